package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// nodeInitSpec describes a node's namespaces.
type nodeInitSpec struct {
	Node       string
	Address    string
	Root       string // the node's root directory
	Cgroup     string
	Kube       string // directory with Kubernetes programs
	Containerd string
	CNI        string
	DriverRoot string
	// A directory with additional files for the node's /usr, or "".
	UsrAdditions string
}

// readyDescriptor is the file descriptor at which nodeInit reports that the node is ready.
const readyDescriptor = 3

// nodeInit is PID 1 of a node. It starts in new namespaces and creates the node's file systems: a
// separate /, the machine's /usr (read-only), and separate devices and cgroups. After that, it
// reaps orphan processes. When nodeInit exits, the kernel kills all processes of the node.
func nodeInit(spec nodeInitSpec) error {
	ready := os.NewFile(readyDescriptor, "ready")
	if ready == nil {
		return errors.New("node-init is an internal command")
	}
	if err := joinCgroup(spec.Cgroup); err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("new cgroup namespace: %w", err)
	}
	all, err := hierarchies()
	if err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(spec.Node)); err != nil {
		return fmt.Errorf("set host name: %w", err)
	}
	if err := makeRoot(spec, all); err != nil {
		return err
	}
	if leaf := nodeLeaf(); leaf != "" {
		// Leave the node's own cgroup, because the kubelet enables controllers for its children.
		if err := joinCgroup(leaf); err != nil {
			return err
		}
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644); err != nil {
		return err
	}
	children := make(chan os.Signal, 1)
	signal.Notify(children, syscall.SIGCHLD)
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT, syscall.SIGPIPE)
	if _, err := ready.WriteString("ready"); err != nil {
		return err
	}
	if err := ready.Close(); err != nil {
		return err
	}
	for range children {
		for {
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
	return nil
}

// sysctls are the sysctls that a kubelet writes. On a node, these paths are regular files, so that
// the machine's settings do not change.
var sysctls = []string{
	"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
	"kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
}

func makeRoot(spec nodeInitSpec, cgroups []hierarchy) error {
	// Mounts must not propagate between the node and the machine.
	if err := mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	root := spec.Root
	at := func(path string) string { return filepath.Join(root, path) }
	if err := mount(root, root, "", unix.MS_BIND, ""); err != nil {
		return err
	}
	for _, dir := range []string{
		"proc", "sys", "dev", "usr", "root", "opt", "run", "tmp", "etc/cdi", "etc/cni/net.d", "run/cdi",
		"var/lib/kubelet", "var/lib/containerd", "var/lib/simgpu", "var/lib/cleave", "var/log", "var/tmp",
		kubeInNode, containerdInNode, cniInNode, driverRootInNode,
	} {
		if err := os.MkdirAll(at(dir), 0o755); err != nil {
			return err
		}
	}
	for _, dir := range []string{"tmp", "var/tmp"} {
		if err := os.Chmod(at(dir), 0o777|fs.ModeSticky); err != nil {
			return err
		}
	}
	if err := symlink("/run", at("var/run")); err != nil {
		return err
	}
	for _, dir := range []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} {
		info, err := os.Lstat("/" + dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return err
		}
		if info.Mode()&fs.ModeSymlink != 0 {
			target, err := os.Readlink("/" + dir)
			if err != nil {
				return err
			}
			if err := symlink(target, at(dir)); err != nil {
				return err
			}
			continue
		}
		if err := os.MkdirAll(at(dir), 0o755); err != nil {
			return err
		}
		if err := bindReadOnly("/"+dir, at(dir)); err != nil {
			return err
		}
	}
	if err := makeEtc(spec, at("etc")); err != nil {
		return err
	}
	binds := [][2]string{
		{"/usr", "usr"}, {spec.Kube, kubeInNode}, {spec.Containerd, containerdInNode}, {spec.CNI, cniInNode},
	}
	if spec.DriverRoot != "" {
		binds = append(binds, [2]string{spec.DriverRoot, driverRootInNode})
	}
	for _, bind := range binds {
		if err := bindReadOnly(bind[0], at(bind[1])); err != nil {
			return err
		}
	}
	if spec.UsrAdditions != "" {
		// The overlay has no upper directory, so it is read-only.
		if err := mount("overlay", at("usr"), "overlay", 0, "lowerdir="+spec.UsrAdditions+":/usr"); err != nil {
			return err
		}
	}
	if err := mount("proc", at("proc"), "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	for _, name := range sysctls {
		file, real := at("etc/e2e-sysctl/"+name), at("proc/sys/"+name)
		value, err := os.ReadFile(real)
		if err != nil {
			return err
		}
		if err := writeFile(file, value, 0o644); err != nil {
			return err
		}
		if err := mount(file, real, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	if err := mount("sysfs", at("sys"), "sysfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	if err := mountCgroups(at, cgroups); err != nil {
		return err
	}
	if err := makeDevices(at("dev")); err != nil {
		return err
	}
	return pivot(root)
}

// makeEtc writes the node's /etc: copies of files that programs of the machine need, and files of
// the node.
func makeEtc(spec nodeInitSpec, etc string) error {
	for _, name := range []string{
		"alternatives", "group", "iproute2", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "nsswitch.conf",
		"os-release", "passwd", "protocols", "services", "ssl",
	} {
		if err := copyTree(filepath.Join("/etc", name), filepath.Join(etc, name)); err != nil {
			return err
		}
	}
	hosts := fmt.Sprintf("127.0.0.1\tlocalhost\n%s\t%s\n", spec.Address, spec.Node)
	for name, content := range map[string]string{"hostname": spec.Node + "\n", "hosts": hosts, "resolv.conf": ""} {
		if err := writeFile(filepath.Join(etc, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	return symlink("/proc/self/mounts", filepath.Join(etc, "mtab"))
}

// mountCgroups mounts each hierarchy again. In the node's cgroup namespace, the root of each
// hierarchy is the node's cgroup.
func mountCgroups(at func(string) string, all []hierarchy) error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	if pureUnified(all) {
		return mount("cgroup2", at("sys/fs/cgroup"), "cgroup2", flags, "")
	}
	if err := mount("tmpfs", at("sys/fs/cgroup"), "tmpfs", flags, "mode=755"); err != nil {
		return err
	}
	for _, h := range all {
		kind := "cgroup"
		if h.unified {
			kind = "cgroup2"
		}
		if err := os.MkdirAll(at(h.mount), 0o755); err != nil {
			return err
		}
		if err := mount(kind, at(h.mount), kind, flags, h.data); err != nil {
			return err
		}
	}
	// Copy links such as cpu → cpu,cpuacct.
	entries, err := os.ReadDir("/sys/fs/cgroup")
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.Type()&fs.ModeSymlink == 0 {
			continue
		}
		target, err := os.Readlink(filepath.Join("/sys/fs/cgroup", entry.Name()))
		if err != nil {
			return err
		}
		if err := symlink(target, at(filepath.Join("sys/fs/cgroup", entry.Name()))); err != nil {
			return err
		}
	}
	return nil
}

// makeDevices creates the node's /dev with the machine's device nodes. Tests can add device nodes,
// for example of a simulated GPU, and these do not appear on the machine.
func makeDevices(dev string) error {
	if err := mount("tmpfs", dev, "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
		return err
	}
	// Skip these paths. The node has its own mounts and links at them, except at /dev/hugepages.
	own := map[string]bool{"/dev/pts": true, "/dev/shm": true, "/dev/mqueue": true, "/dev/hugepages": true, "/dev/ptmx": true}
	err := filepath.WalkDir("/dev", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return ignoreMissing(err)
		}
		if own[path] {
			if entry.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		target := filepath.Join(dev, strings.TrimPrefix(path, "/dev"))
		switch {
		case path == "/dev":
			return nil
		case entry.IsDir():
			return os.MkdirAll(target, 0o755)
		case entry.Type()&fs.ModeSymlink != 0:
			link, err := os.Readlink(path)
			if err != nil {
				return ignoreMissing(err)
			}
			return symlink(link, target)
		case entry.Type()&fs.ModeDevice != 0:
			var stat unix.Stat_t
			if err := unix.Lstat(path, &stat); err != nil {
				return ignoreMissing(err)
			}
			if err := unix.Mknod(target, stat.Mode, int(stat.Rdev)); err != nil {
				return &fs.PathError{Op: "mknod", Path: target, Err: err}
			}
			return os.Chmod(target, fs.FileMode(stat.Mode&0o777)) // undo the umask
		}
		return nil // sockets and pipes belong to the machine's programs
	})
	if err != nil {
		return err
	}
	for _, made := range []struct{ dir, kind, data string }{
		{"pts", "devpts", "newinstance,ptmxmode=0666,mode=0620"}, {"shm", "tmpfs", "mode=1777"}, {"mqueue", "mqueue", ""},
	} {
		if err := os.Mkdir(filepath.Join(dev, made.dir), 0o755); err != nil {
			return err
		}
		if err := mount(made.kind, filepath.Join(dev, made.dir), made.kind, unix.MS_NOSUID|unix.MS_NOEXEC, made.data); err != nil {
			return err
		}
	}
	return symlink("pts/ptmx", filepath.Join(dev, "ptmx"))
}

// pivot makes root the root directory of this namespace.
func pivot(root string) error {
	if err := os.Chdir(root); err != nil {
		return err
	}
	// With the same path for both arguments, the old root covers the new root. Unmount the old root.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount the machine's root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	// Let mounts propagate between the node and its containers.
	return mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}

func mount(source, target, kind string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s%s at %s: %w", kind, source, target, err)
	}
	return nil
}

func bindReadOnly(source, target string) error {
	if err := mount(source, target, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	attributes := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(unix.AT_FDCWD, target, unix.AT_RECURSIVE, &attributes); err != nil {
		return fmt.Errorf("make %s read-only: %w", target, err)
	}
	return nil
}

func symlink(target, path string) error {
	if err := os.Symlink(target, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// copyTree copies a file, or a directory with its contents. It copies symbolic links as links, and
// skips missing files.
func copyTree(source, target string) error {
	info, err := os.Stat(source)
	if err != nil {
		return ignoreMissing(err)
	}
	if !info.IsDir() {
		return copyFile(source, target, info.Mode().Perm())
	}
	return filepath.WalkDir(source, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return ignoreMissing(err)
		}
		to := filepath.Join(target, strings.TrimPrefix(path, source))
		switch {
		case entry.IsDir():
			return os.MkdirAll(to, 0o755)
		case entry.Type()&fs.ModeSymlink != 0:
			link, err := os.Readlink(path)
			if err != nil {
				return ignoreMissing(err)
			}
			return symlink(link, to)
		case entry.Type().IsRegular():
			info, err := entry.Info()
			if err != nil {
				return ignoreMissing(err)
			}
			return copyFile(path, to, info.Mode().Perm())
		}
		return nil
	})
}

func copyFile(source, target string, mode fs.FileMode) error {
	from, err := os.Open(source)
	if err != nil {
		return ignoreMissing(err)
	}
	defer from.Close()
	content, err := io.ReadAll(from)
	if err != nil {
		return err
	}
	return writeFile(target, content, mode)
}
