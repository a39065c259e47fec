package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// versionVariable is the environment variable with the version of Kubernetes, such as 1.34.4.
const versionVariable = "CLEAVE_KUBERNETES"

// kubernetes is a version of Kubernetes 1 that the launcher can build.
type kubernetes struct{ minor, patch int }

// defaultKubernetes is the version that kube/go.mod requires.
var defaultKubernetes = kubernetes{minor: 37, patch: 2}

func (k kubernetes) String() string { return fmt.Sprintf("1.%d.%d", k.minor, k.patch) }

// compare orders versions from the oldest to the newest.
func (k kubernetes) compare(other kubernetes) int {
	return slices.Compare([]int{k.minor, k.patch}, []int{other.minor, other.patch})
}

// modfile returns the path of the version's go.mod, relative to the module kube. For the default
// version, it returns "", because that version uses the module's own go.mod.
func (k kubernetes) modfile() string {
	if k == defaultKubernetes {
		return ""
	}
	return filepath.Join("versions", k.String(), "go.mod")
}

// parseKubernetes parses a version such as 1.34.4.
func parseKubernetes(text string) (kubernetes, error) {
	var k kubernetes
	if _, err := fmt.Sscanf(text, "1.%d.%d", &k.minor, &k.patch); err != nil || k.String() != text {
		return kubernetes{}, fmt.Errorf("%q is not a version of Kubernetes, such as %s", text, defaultKubernetes)
	}
	return k, nil
}

// kubernetesVersions returns the versions that the launcher can build, from the oldest to the
// newest: the default version and each version with a directory in kube/versions.
func kubernetesVersions(source string) ([]kubernetes, error) {
	entries, err := os.ReadDir(filepath.Join(source, "kube", "versions"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	found := []kubernetes{defaultKubernetes}
	for _, entry := range entries {
		k, err := parseKubernetes(entry.Name())
		if err != nil {
			return nil, fmt.Errorf("kube/versions: %w", err)
		}
		if k == defaultKubernetes {
			return nil, fmt.Errorf("kube/versions/%s: this is the default version, which kube/go.mod builds: remove the directory", k)
		}
		found = append(found, k)
	}
	slices.SortFunc(found, kubernetes.compare)
	return found, nil
}

// selectKubernetes returns the available version with this name. If the name is "", it returns the
// default version.
func selectKubernetes(name string, available []kubernetes) (kubernetes, error) {
	if name == "" {
		return defaultKubernetes, nil
	}
	names := make([]string, len(available))
	for i, k := range available {
		names[i] = k.String()
	}
	if i := slices.Index(names, name); i >= 0 {
		return available[i], nil
	}
	return kubernetes{}, fmt.Errorf("%s: there is no version %q: use one of %s", versionVariable, name, strings.Join(names, ", "))
}
