package main

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// hierarchy is a mounted cgroup tree. Version 1 has a tree for each controller or group of
// controllers, and version 2 has one tree for all controllers. A hybrid machine has trees of both
// versions.
type hierarchy struct {
	mount string // mount point
	// Mount options with which a node mounts the hierarchy again.
	data    string
	unified bool
	// Controllers of a version 1 hierarchy; nil for a named hierarchy and for version 2.
	controllers []string
}

// parseHierarchies returns the cgroup trees in /proc/self/mountinfo, without duplicates.
func parseHierarchies(mountinfo string) []hierarchy {
	var found []hierarchy
	scanner := bufio.NewScanner(strings.NewReader(mountinfo))
	for scanner.Scan() {
		before, after, ok := strings.Cut(scanner.Text(), " - ")
		fields, types := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 6 || len(types) < 3 || !strings.HasPrefix(fields[4], "/sys/fs/cgroup") {
			continue
		}
		h := hierarchy{mount: fields[4], unified: types[0] == "cgroup2"}
		if !h.unified {
			if types[0] != "cgroup" {
				continue
			}
			var options []string
			for option := range strings.SplitSeq(types[2], ",") {
				switch {
				case strings.HasPrefix(option, "name="):
					options = append(options, "none", option)
				case option == "rw" || option == "ro" || option == "xattr" || strings.Contains(option, "="):
				default:
					options = append(options, option)
					h.controllers = append(h.controllers, option)
				}
			}
			h.data = strings.Join(options, ",")
		}
		if !slices.ContainsFunc(found, func(other hierarchy) bool { return other.unified == h.unified && other.data == h.data }) {
			found = append(found, h)
		}
	}
	return found
}

func hierarchies() ([]hierarchy, error) {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	found := parseHierarchies(string(info))
	if len(found) == 0 {
		return nil, errors.New("no cgroups are mounted below /sys/fs/cgroup")
	}
	return found, nil
}

// pureUnified reports whether the machine has only a version 2 tree. On such a machine, a node's
// cgroup cannot contain processes, because the kubelet enables controllers for the cgroup's
// children.
func pureUnified(all []hierarchy) bool { return len(all) == 1 && all[0].unified }

// nodeLeaf is the cgroup of the node's own processes, as a path below the node's cgroup.
func nodeLeaf() string {
	if all, err := hierarchies(); err == nil && pureUnified(all) {
		return "/init"
	}
	return ""
}

// makeCgroup creates a cgroup and its parents in every hierarchy. On a machine with only version 2,
// it makes all controllers available to a node's cgroup.
func makeCgroup(path string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	return makeCgroupIn(all, path)
}

func makeCgroupIn(all []hierarchy, path string) error {
	for _, h := range all {
		dir := h.mount
		for depth, part := range strings.Split(strings.Trim(path, "/"), "/") {
			// Do not enable controllers in the node's own cgroup, which is the second level: the node's
			// first process could not join it. The kubelet enables the controllers there.
			if pureUnified(all) && depth < 2 {
				if err := enableControllers(dir); err != nil {
					return err
				}
			}
			parent := dir
			dir = filepath.Join(dir, part)
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return err
			}
			if slices.Contains(h.controllers, "cpuset") {
				// A new cpuset has no processors and no memory nodes, and accepts processes only after both
				// files are set.
				for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
					value, err := os.ReadFile(filepath.Join(parent, file))
					if err != nil {
						return err
					}
					if err := os.WriteFile(filepath.Join(dir, file), value, 0o644); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}

// enableControllers enables all controllers of a version 2 cgroup for the cgroup's children.
func enableControllers(dir string) error {
	available, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	for controller := range strings.FieldsSeq(string(available)) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0o644); err != nil {
			return fmt.Errorf("enable %s below %s: %w", controller, dir, err)
		}
	}
	return nil
}

// joinCgroup moves this process to the cgroup in every hierarchy.
func joinCgroup(path string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		file := filepath.Join(h.mount, path, "cgroup.procs")
		if err := os.WriteFile(file, []byte("0"), 0o644); err != nil {
			return fmt.Errorf("join cgroup: %w", err)
		}
	}
	return nil
}

// cgroupDirs returns the existing directories of a cgroup in all hierarchies.
func cgroupDirs(path string) ([]string, error) {
	all, err := hierarchies()
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, h := range all {
		dir := filepath.Join(h.mount, path)
		if _, err := os.Stat(dir); err == nil {
			dirs = append(dirs, dir)
		}
	}
	return dirs, nil
}

// cgroupProcesses returns the PIDs in a cgroup and its descendants.
func cgroupProcesses(path string) ([]int, error) {
	dirs, err := cgroupDirs(path)
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, dir := range dirs {
		err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.IsDir() {
				return ignoreMissing(err)
			}
			content, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
			if err != nil {
				return ignoreMissing(err)
			}
			for field := range strings.FieldsSeq(string(content)) {
				pid, err := strconv.Atoi(field)
				if err != nil {
					return err
				}
				if pid != 0 && !slices.Contains(pids, pid) {
					pids = append(pids, pid)
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return pids, nil
}

// removeCgroup removes a cgroup and its descendants. All processes in these cgroups must have
// exited.
func removeCgroup(path string, deadline time.Time) error {
	dirs, err := cgroupDirs(path)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		for {
			err := removeCgroupTree(dir)
			if err == nil {
				break
			}
			// For a short time, the kernel still counts processes that have just exited.
			if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
				return err
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}

func removeCgroupTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ignoreMissing(err)
	}
	for _, entry := range entries {
		if entry.IsDir() {
			if err := removeCgroupTree(filepath.Join(dir, entry.Name())); err != nil {
				return err
			}
		}
	}
	// Use rmdir, because the files in a cgroup belong to the kernel and cannot be removed.
	return ignoreMissing(unix.Rmdir(dir))
}

func ignoreMissing(err error) error {
	// ENODEV: the cgroup was removed while its file was open.
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}
