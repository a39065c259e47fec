package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// How containerd uses NVIDIA's runtime.
const (
	toolkitDefault = "default" // for each pod without a RuntimeClass
	toolkitClass   = "class"   // for pods whose RuntimeClass has the handler nvidia
)

// toolkitConfig returns the part of containerd's configuration that `nvidia-ctk runtime configure`
// would add on a real node.
func toolkitConfig(use string) string {
	if use == "" {
		return ""
	}
	config := `
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]
      BinaryName = "/usr/bin/nvidia-container-runtime"
      SystemdCgroup = false
`
	if use == toolkitDefault {
		config += `
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = "nvidia"
`
	}
	return config
}

// installToolkit copies the driver's files and the toolkit's programs to a directory with
// additional files for a node's /usr. The paths are those of the Debian packages.
func installToolkit(usr, driver, toolkit string) error {
	if err := os.RemoveAll(usr); err != nil {
		return err
	}
	directories := [][2]string{{toolkit, "bin"}}
	if driver != "" {
		directories = append(directories, [2]string{filepath.Join(driver, "bin"), "bin"}, [2]string{filepath.Join(driver, "lib"), "lib/x86_64-linux-gnu"})
	}
	for _, directory := range directories {
		source, target := directory[0], filepath.Join(usr, directory[1])
		if err := os.MkdirAll(target, 0o755); err != nil {
			return err
		}
		if err := copyTree(source, target); err != nil {
			return fmt.Errorf("copy %s: %w", source, err)
		}
	}
	// On the node, these directories cover the machine's directories and determine their modes, so the
	// modes must be the same.
	return filepath.WalkDir(usr, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && entry.IsDir() {
			err = os.Chmod(path, 0o755)
		}
		return err
	})
}
