package main

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestParseStat(t *testing.T) {
	const rest = " S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 1000 10 18446744073709551615"
	for _, name := range []string{"(sh)", "(a b)", "(a) R 1 2 3)", "()"} {
		ended, start, err := parseStat("17 " + name + rest)
		if err != nil || ended || start != 4242 {
			t.Errorf("%s: %t, %d, %v", name, ended, start, err)
		}
	}
	zombie := "17 (sh)" + strings.Replace(rest, " S ", " Z ", 1)
	if ended, _, err := parseStat(zombie); err != nil || !ended {
		t.Errorf("a zombie counts as running: %v", err)
	}
	if ended, _, err := parseStat(strings.Replace(zombie, " 20 0 1 0 ", " 20 0 9 0 ", 1)); err != nil || ended {
		t.Errorf("a process with exiting threads counts as exited: %v", err)
	}
	for _, stat := range []string{"", "17 (sh", "17 (sh) S 1 2", "17 (sh) S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 x 1"} {
		if _, _, err := parseStat(stat); err == nil {
			t.Errorf("%q is accepted as a stat", stat)
		}
	}
}

// startIdleProcess starts an idle process and kills it at the end of the test.
func startIdleProcess(t *testing.T) (process, *exec.Cmd) {
	t.Helper()
	command := exec.Command("sleep", "1000")
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	})
	p, err := identify(command.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return p, command
}

func TestReusedProcessIDIsAnotherProcess(t *testing.T) {
	p, _ := startIdleProcess(t)
	for what, other := range map[string]process{
		"started later":      {PID: p.PID, Start: p.Start + 1, Boot: p.Boot},
		"before this boot":   {PID: p.PID, Start: p.Start, Boot: "another"},
		"of no process here": {PID: 1 << 30, Start: p.Start, Boot: p.Boot},
	} {
		if other.isRunning() {
			t.Errorf("%s: the process counts as alive", what)
		}
		if err := other.signal(unix.SIGKILL); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if err := other.waitUntilExited(context.Background()); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if !p.isRunning() {
		t.Fatal("a signal for another process killed this one")
	}
}

// New kernels return the same error for the ID of a thread and for the PID of a process that is
// being reaped.
func TestAThreadIsNoProcess(t *testing.T) {
	entries, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		id, err := strconv.Atoi(entry.Name())
		if err != nil {
			t.Fatal(err)
		}
		if id == os.Getpid() {
			continue
		}
		if _, err := unix.PidfdOpen(id, 0); errors.Is(err, unix.EINVAL) {
			t.Skip("this kernel refuses threads")
		}
		if err := (process{PID: id}).signal(unix.SIGKILL); err != nil {
			t.Errorf("thread %d: %v", id, err)
		}
	}
}

func TestWaitUntilExitedWaitsForTheProcess(t *testing.T) {
	p, command := startIdleProcess(t)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if err := p.waitUntilExited(ctx); err == nil {
		t.Error("a running process counts as exited")
	}
	if err := p.signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	// A zombie counts as exited.
	if err := p.waitUntilExited(context.Background()); err != nil {
		t.Fatal(err)
	}
	if p.isRunning() {
		t.Error("a zombie is alive")
	}
	_ = command.Wait()
}

func TestIdentifyThisProcess(t *testing.T) {
	p, err := identify(os.Getpid())
	if err != nil || !p.isRunning() || p.Start == 0 || p.Boot == "" {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestParseHierarchies(t *testing.T) {
	hybrid := parseHierarchies(`24 1 0:21 / / rw - ext4 /dev/vda rw
30 24 0:25 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
31 30 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:1 - cgroup cgroup rw,cpu,cpuacct
32 30 0:27 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
33 30 0:28 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,release_agent=/lib/x,name=systemd
34 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate
35 30 0:27 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
36 24 0:27 / /elsewhere rw,relatime - cgroup cgroup rw,memory
`)
	want := []struct {
		mount, data string
		unified     bool
	}{
		{"/sys/fs/cgroup/cpu,cpuacct", "cpu,cpuacct", false},
		{"/sys/fs/cgroup/cpuset", "cpuset", false},
		{"/sys/fs/cgroup/systemd", "none,name=systemd", false},
		{"/sys/fs/cgroup/unified", "", true},
	}
	if len(hybrid) != len(want) {
		t.Fatalf("got %+v", hybrid)
	}
	for i, w := range want {
		if got := hybrid[i]; got.mount != w.mount || got.data != w.data || got.unified != w.unified {
			t.Errorf("got %+v, want %+v", got, w)
		}
	}
	if pureUnified(hybrid) {
		t.Error("a hybrid machine counts as pure version 2")
	}
	if !pureUnified(parseHierarchies("30 24 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n")) {
		t.Error("a pure version 2 machine is not detected")
	}
}
