package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Paths on a node.
const (
	driverRootInNode = "/opt/simgpu"
	kubeInNode       = "/opt/e2e/kube"
	containerdInNode = "/opt/e2e/containerd"
	cniInNode        = "/opt/cni/bin"
	containerdSocket = "/run/containerd/containerd.sock"
	nodePath         = kubeInNode + ":" + containerdInNode + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// defaultStateDir is the parent directory of each cluster's directory, unless --state sets the
// directory.
const defaultStateDir = "/var/lib/cleave-e2e"

// nameVariable is the environment variable with the cluster's name, unless --name sets the name.
const nameVariable = "CLEAVE_CLUSTER_NAME"

// stateFileName is the name of the file in the cluster's directory that contains a clusterState.
const stateFileName = "cluster.json"

// markerVariable is an environment variable of each process that the launcher starts. Its value is
// the cluster's directory.
const markerVariable = "CLEAVE_E2E_CLUSTER"

// layout contains the paths, names and addresses that a cluster uses on the machine.
type layout struct {
	name string
	dir  string
	// The path of the launcher program.
	launcher string
	// The addresses of the cluster. The command up claims addresses, and other commands read them from
	// the state. claimed is whether the addresses are known.
	addresses addresses
	claimed   bool
}

var validName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$`)

func newLayout(name, dir string) (layout, error) {
	if !validName.MatchString(name) {
		return layout{}, fmt.Errorf("--name %q: 1 to 32 of a-z, 0-9 and -, not at the ends", name)
	}
	if dir == "" {
		dir = filepath.Join(defaultStateDir, name)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return layout{}, err
	}
	launcher, err := os.Executable()
	if err != nil {
		return layout{}, err
	}
	l := layout{name: name, dir: dir, launcher: launcher}
	// A Unix socket's path is limited to 107 bytes, and tests open the nodes' sockets by their paths
	// on the machine.
	if room := 107 - len(l.nodeRoot("node100")); room < 50 {
		return layout{}, fmt.Errorf("--state %s: too long for the paths of sockets below it", dir)
	}
	return l, nil
}

func (l layout) nodeDir(node string) string { return filepath.Join(l.dir, "nodes", node) }

// nodeRoot is the node's root directory.
func (l layout) nodeRoot(node string) string     { return filepath.Join(l.nodeDir(node), "host") }
func (l layout) inNode(node, path string) string { return filepath.Join(l.nodeRoot(node), path) }
func (l layout) nodeFile(node string) string     { return filepath.Join(l.nodeDir(node), "node.json") }
func (l layout) stateFile() string               { return filepath.Join(l.dir, stateFileName) }
func (l layout) pki(file string) string          { return filepath.Join(l.dir, "pki", file) }
func (l layout) config(file string) string       { return filepath.Join(l.dir, "config", file) }
func (l layout) binDir() string                  { return filepath.Join(l.dir, "bin") }
func (l layout) kubeconfig() string              { return filepath.Join(l.dir, "kubeconfig") }
func (l layout) imagesDir() string               { return filepath.Join(l.dir, "images") }
func (l layout) logFile(c component) string {
	return filepath.Join(l.dir, "logs", c.String()+".log")
}
func (l layout) processFile(c component) string {
	return filepath.Join(l.dir, "run", c.String()+".json")
}

// lockPath is outside the cluster's directory, because down removes that directory while it has the
// lock.
func (l layout) lockPath() string { return l.dir + ".lock" }

// cgroup is the path of a node's cgroup in every hierarchy. If node is "", it is the path of the
// control plane's cgroup.
func (l layout) cgroup(node string) string {
	if node == "" {
		node = "control-plane"
	}
	return l.cgroupTop() + "/" + node
}
func (l layout) cgroupTop() string { return "/cleave-e2e-" + l.name }

// marker is the environment entry that identifies this cluster's processes.
func (l layout) marker() string { return markerVariable + "=" + l.dir }

func (l layout) apiURL() string { return fmt.Sprintf("https://%s:%d", l.addresses.host(), apiPort) }

// shellEnv returns shell commands that set the environment for using the cluster. Helm's
// directories are in the cluster's directory, so that Helm does not use the user's settings.
func (l layout) shellEnv() string {
	helm := filepath.Join(l.dir, "helm")
	var lines strings.Builder
	for _, line := range [][2]string{
		{"KUBECONFIG", l.kubeconfig()},
		{"HELM_CACHE_HOME", filepath.Join(helm, "cache")},
		{"HELM_CONFIG_HOME", filepath.Join(helm, "config")},
		{"HELM_DATA_HOME", filepath.Join(helm, "data")},
	} {
		fmt.Fprintf(&lines, "export %s=%s\n", line[0], shellQuote(line[1]))
	}
	fmt.Fprintf(&lines, "case \":$PATH:\" in *:%[1]s:*) ;; *) export PATH=%[1]s:\"$PATH\" ;; esac\n", shellQuote(l.binDir()))
	return lines.String()
}

func shellQuote(text string) string {
	if !strings.ContainsFunc(text, func(r rune) bool {
		return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-:=", r)
	}) {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

// node contains the stored properties of a node.
type node struct {
	Name string `json:"name"`
	// The index, from 1. The index determines addresses and device names.
	Index      int    `json:"index"`
	DriverRoot string `json:"driverRoot,omitempty"`
	// How containerd uses NVIDIA's runtime: toolkitDefault or toolkitClass, or "" without the toolkit.
	Toolkit string `json:"toolkit,omitempty"`
	// The seconds between status reports of the node's kubelet, or 0 for Kubernetes' default.
	StatusSeconds int `json:"statusSeconds,omitempty"`
}

// nodes returns the cluster's nodes, sorted by index.
func (l layout) nodes() ([]node, error) {
	entries, err := os.ReadDir(filepath.Join(l.dir, "nodes"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var found []node
	for _, entry := range entries {
		n, err := readJSON[node](l.nodeFile(entry.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue // an interrupted removal, which `up` and `down` clean up
		} else if err != nil {
			return nil, err
		}
		found = append(found, n)
	}
	slices.SortFunc(found, func(a, b node) int { return a.Index - b.Index })
	return found, nil
}

// freeIndex is the lowest unused index.
func freeIndex(nodes []node) (int, error) {
	for index := 1; index <= maxNodes; index++ {
		if !slices.ContainsFunc(nodes, func(n node) bool { return n.Index == index }) {
			return index, nil
		}
	}
	return 0, fmt.Errorf("a cluster has %d nodes at most", maxNodes)
}

func readJSON[T any](path string) (T, error) {
	var value T
	content, err := os.ReadFile(path)
	if err != nil {
		return value, err
	}
	if err := json.Unmarshal(content, &value); err != nil {
		return value, fmt.Errorf("%s: %w", path, err)
	}
	return value, nil
}

func writeJSON(path string, value any) error {
	content, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(path, append(content, '\n'), 0o600)
}

// writeFile creates or replaces a file atomically, and creates its parent directories.
func writeFile(path string, content []byte, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), ".writing-")
	if err != nil {
		return err
	}
	defer os.Remove(file.Name()) // fails after the rename
	_, err = file.Write(content)
	err = errors.Join(err, file.Chmod(mode), file.Close())
	if err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}
