package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// With only version 2, a node has the controllers that the parent of its cgroup enables. The node's
// own cgroup must not enable controllers yet, because the node's first process must be able to join
// that cgroup.
func TestControllersReachTheNode(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"", "top", "top/node1"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, dir, "cgroup.controllers"), []byte("cpu\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := makeCgroupIn([]hierarchy{{mount: root, unified: true}}, "/top/node1/init"); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]string{"": "+cpu", "top": "+cpu", "top/node1": "", "top/node1/init": ""} {
		enabled, err := os.ReadFile(filepath.Join(root, dir, "cgroup.subtree_control"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
		if string(enabled) != want {
			t.Errorf("below %q: %q, want %q", dir, enabled, want)
		}
	}
	if _, err := os.Stat(filepath.Join(root, "top/node1/init")); err != nil {
		t.Error(err)
	}
}
