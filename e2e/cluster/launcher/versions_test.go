package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// allVersions returns all versions that the launcher in this source tree can build.
func allVersions(t *testing.T) []kubernetes {
	t.Helper()
	versions, err := kubernetesVersions("..")
	if err != nil {
		t.Fatal(err)
	}
	return versions
}

func TestVersionIsParsedExactly(t *testing.T) {
	if k, err := parseKubernetes("1.34.4"); err != nil || k != (kubernetes{34, 4}) {
		t.Errorf("1.34.4 is %v, %v", k, err)
	}
	for _, text := range []string{"", "1.34", "v1.34.4", "1.34.4-rc.1", "1.034.4", "1.34.4 ", "2.34.4", "latest"} {
		if k, err := parseKubernetes(text); err == nil {
			t.Errorf("%q is parsed as %v", text, k)
		}
	}
}

func TestVersionIsSelectedByName(t *testing.T) {
	available := []kubernetes{{34, 4}, {36, 4}}
	for name, expected := range map[string]kubernetes{"": defaultKubernetes, "1.34.4": {34, 4}, "1.36.4": {36, 4}} {
		if k, err := selectKubernetes(name, available); err != nil || k != expected {
			t.Errorf("%q selects %v, %v", name, k, err)
		}
	}
	_, err := selectKubernetes("1.34", available)
	if err == nil || !strings.Contains(err.Error(), "1.34.4, 1.36.4") {
		t.Errorf("the error for an unknown version does not list the versions: %v", err)
	}
}

func TestVersionsAreTheDefaultAndTheDirectories(t *testing.T) {
	source := t.TempDir()
	versions := func() ([]kubernetes, error) { return kubernetesVersions(source) }
	if found, err := versions(); err != nil || !slices.Equal(found, []kubernetes{defaultKubernetes}) {
		t.Errorf("without directories: %v, %v", found, err)
	}
	for _, name := range []string{"1.38.2", "1.34.4", "1.34.10"} {
		write(t, filepath.Join(source, "kube", "versions", name, "go.mod"), "")
	}
	found, err := versions()
	if expected := []kubernetes{{34, 4}, {34, 10}, defaultKubernetes, {38, 2}}; err != nil || !slices.Equal(found, expected) {
		t.Errorf("got %v, %v", found, err)
	}
	for _, name := range []string{"latest", defaultKubernetes.String()} {
		path := filepath.Join(source, "kube", "versions", name)
		write(t, filepath.Join(path, "go.mod"), "")
		if found, err := versions(); err == nil {
			t.Errorf("with the directory %s: %v", name, found)
		}
		if err := os.RemoveAll(path); err != nil {
			t.Fatal(err)
		}
	}
}

// Each go.mod must require its version of Kubernetes, and replace all staging modules with that
// version.
func TestGoModsHaveTheirVersion(t *testing.T) {
	for _, k := range allVersions(t) {
		u := units(k)[0]
		path := filepath.Join("..", u.dir, "go.mod")
		if u.modfile != "" {
			path = filepath.Join("..", u.dir, u.modfile)
		}
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if line := fmt.Sprintf("k8s.io/kubernetes v%s\n", k); !strings.Contains(string(content), line) {
			t.Errorf("%s has no %q", path, line)
		}
		replacements := 0
		for _, line := range strings.Split(string(content), "\n") {
			module, replacement, ok := strings.Cut(strings.TrimSpace(line), " => ")
			if !ok {
				continue
			}
			replacements++
			if expected := fmt.Sprintf("%s v0.%d.%d", module, k.minor, k.patch); replacement != expected {
				t.Errorf("%s replaces %s by %s, not by %s", path, module, replacement, expected)
			}
		}
		if replacements == 0 {
			t.Errorf("%s replaces no staging module", path)
		}
	}
}

func TestVersionsDifferOnlyInKubernetes(t *testing.T) {
	keys := make(map[string]string)
	for _, k := range allVersions(t) {
		for _, u := range units(k) {
			key := testCacheKey(t, u, "..", "go1")
			switch other, ok := keys[key]; {
			case u.name == "kube" && ok:
				t.Errorf("%s has the key of %s", k, other)
			case u.name != "kube" && !ok && k != allVersions(t)[0]:
				t.Errorf("%s of %s is built again", u.name, k)
			}
			keys[key] = k.String()
		}
	}
}

// requirements returns the module versions that a go.mod requires, except modules that it replaces.
func requirements(t *testing.T, path string) map[string]string {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	found := make(map[string]string)
	for _, line := range strings.Split(string(content), "\n") {
		fields := strings.Fields(strings.TrimPrefix(strings.TrimSpace(line), "require "))
		if len(fields) >= 2 && strings.Contains(fields[0], ".") && strings.HasPrefix(fields[1], "v") {
			found[fields[0]] = fields[1]
		}
	}
	for _, line := range strings.Split(string(content), "\n") {
		if module, _, ok := strings.Cut(strings.TrimSpace(line), " => "); ok {
			delete(found, module)
		}
	}
	return found
}

// Go compiles a package once for all programs only if they use the same version of the package's
// module. With different versions, a first build takes minutes longer.
func TestGoModsShareTheVersionsOfModules(t *testing.T) {
	kube := requirements(t, "../kube/go.mod")
	if len(kube) < 50 {
		t.Fatalf("kube/go.mod requires only %d modules", len(kube))
	}
	for _, dir := range []string{"../helm", "../containerd", "../../platforms", "../../placement", "../../dra-allocator"} {
		for module, version := range requirements(t, filepath.Join(dir, "go.mod")) {
			if shared, ok := kube[module]; ok && shared != version {
				t.Errorf("%s requires %s %s, and kube requires %s: run go get %[2]s@VERSION in both, with the newer version", dir, module, version, shared)
			}
		}
	}
}
