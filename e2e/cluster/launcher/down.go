package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// down removes the cluster and everything that the cluster created.
func (c *cluster) down(ctx context.Context) error {
	if err := c.sweep(ctx); err != nil {
		return err
	}
	found, err := c.leftovers(ctx)
	if err != nil {
		return err
	}
	if len(found) > 0 {
		return fmt.Errorf("the cluster was not removed completely:\n%s", strings.Join(found, "\n"))
	}
	c.progress.printf("the cluster is removed")
	return nil
}

// sweep removes a cluster in any state. It searches the machine, because stored state may be
// incomplete.
func (c *cluster) sweep(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	// Processes may start other processes while they exit, so repeat until no process remains.
	for {
		found, err := c.processes()
		if err != nil {
			return err
		}
		if len(found) == 0 {
			break
		}
		for _, p := range found {
			if err := p.signal(unix.SIGKILL); err != nil {
				return err
			}
		}
		for _, p := range found {
			if err := p.waitUntilExited(ctx); err != nil {
				return err
			}
		}
	}
	for _, m := range c.mounts() {
		if err := unix.Unmount(m, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("unmount %s: %w", m, err)
		}
	}
	if err := c.layout.removeLinks(ctx); err != nil {
		return err
	}
	if err := removeCgroup(c.layout.cgroupTop(), time.Now().Add(20*time.Second)); err != nil {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	return os.RemoveAll(c.layout.dir)
}

// processes returns the processes of the cluster. It recognizes them by the inherited marker
// variable and by cgroup. It fails if a cluster with the same name and another directory is
// running, because both clusters have the same cgroup.
func (c *cluster) processes() ([]process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	inCgroup, err := cgroupProcesses(c.layout.cgroupTop())
	if err != nil {
		return nil, err
	}
	wanted := make(map[int]bool)
	for _, pid := range inCgroup {
		wanted[pid] = true
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		environment, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "environ"))
		if err != nil {
			continue // it has exited
		}
		switch dir := markedDir(environment); {
		case dir == c.layout.dir:
			wanted[pid] = true
		case dir != "" && wanted[pid]:
			return nil, fmt.Errorf("another cluster %[1]q runs with its state in %[2]s: remove it first (cluster --name %[1]s --state %[2]s down)", c.layout.name, dir)
		}
	}
	var found []process
	for pid := range wanted {
		if pid == os.Getpid() {
			continue
		}
		p, err := identify(pid)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue
		} else if err != nil {
			return nil, err
		}
		if p.isRunning() {
			found = append(found, p)
		}
	}
	return found, nil
}

// markedDir returns the directory of the cluster from the marker in a process's environment, or ""
// without a marker.
func markedDir(environment []byte) string {
	for variable := range bytes.SplitSeq(environment, []byte{0}) {
		if dir, ok := strings.CutPrefix(string(variable), markerVariable+"="); ok {
			return dir
		}
	}
	return ""
}

// mounts returns the mount points below the cluster's directory, the innermost first.
func (c *cluster) mounts() []string {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	var found []string
	for line := range strings.Lines(string(info)) {
		if fields := strings.Fields(line); len(fields) > 4 && (fields[4] == c.layout.dir || strings.HasPrefix(fields[4], c.layout.dir+"/")) {
			found = append([]string{fields[4]}, found...)
		}
	}
	return found
}

// leftovers lists all processes, files, cgroups and network objects on the machine that belong to a
// cluster with this name.
func (c *cluster) leftovers(ctx context.Context) ([]string, error) {
	var found []string
	processes, err := c.processes()
	if err != nil {
		return nil, err
	}
	for _, p := range processes {
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.PID))
		if err != nil {
			continue // it has exited
		}
		found = append(found, fmt.Sprintf("process %d (%s)", p.PID, strings.TrimSpace(string(name))))
	}
	for _, m := range c.mounts() {
		found = append(found, "mount "+m)
	}
	links, err := c.layout.links()
	if err != nil {
		return nil, err
	}
	for _, link := range links {
		found = append(found, "network device "+link)
	}
	// Verify that the launcher creates rules only in the nodes' namespaces. If no cluster exists,
	// check the addresses of the first cluster.
	for _, program := range []string{"iptables-save", "iptables-legacy-save"} {
		output, err := exec.CommandContext(ctx, program).Output()
		if err != nil {
			continue // not installed or not supported by the kernel: no rules
		}
		for _, rule := range c.layout.addresses.rules(string(output)) {
			found = append(found, program+": "+rule)
		}
	}
	dirs, err := cgroupDirs(c.layout.cgroupTop())
	if err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		found = append(found, "cgroup "+dir)
	}
	if _, err := os.Stat(c.layout.dir); err == nil {
		found = append(found, "directory "+c.layout.dir)
	}
	return found, nil
}

// rules returns the rules in the output of iptables-save that contain an address of the cluster's
// networks.
func (a addresses) rules(saved string) []string {
	var rules []string
	for line := range strings.Lines(saved) {
		for word := range strings.FieldsSeq(line) {
			if a.contains(strings.TrimSuffix(word, "/32")) || a.contains(word) {
				rules = append(rules, strings.TrimSpace(line))
				break
			}
		}
	}
	return rules
}
