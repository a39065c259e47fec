package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// process is a child process. The kernel kills the child when this process exits.
type process struct {
	name     string
	log      string
	command  *exec.Cmd
	stopping atomic.Bool
	done     chan struct{}
	err      error // set when done is closed
}

// startRequests receives functions that start child processes. One thread runs all these functions.
var startRequests = func() chan func() {
	queue := make(chan func())
	go func() {
		// Start children on a thread that never exits, because a child receives its parent-death signal
		// when the thread that started it exits.
		runtime.LockOSThread()
		for start := range queue {
			start()
		}
	}()
	return queue
}()

func startProcess(name, log string, env, argv []string) (*process, error) {
	output, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer output.Close()
	command := exec.Command(argv[0], argv[1:]...)
	command.Env = append(os.Environ(), env...)
	command.Stdout, command.Stderr = output, output
	// Use a separate process group, so that an interrupt from the terminal reaches only this process.
	// This process then stops its children in order.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	startRequests <- func() { started <- command.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &process{name: name, log: log, command: command, done: make(chan struct{})}
	go func() {
		p.err = command.Wait()
		close(p.done)
	}()
	return p, nil
}

// stop stops the process and waits for its exit.
func (p *process) stop() {
	p.stopping.Store(true)
	_ = p.command.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(2 * time.Second):
		_ = p.command.Process.Kill()
		<-p.done
	}
}

// usage contains the resources that a process has used.
type usage struct {
	CPUSeconds  float64 `json:"cpuSeconds"`
	ResidentMiB float64 `json:"residentMiB"`
	PeakMiB     float64 `json:"peakMiB"`
}

// usage reads the resources that the process has used since its start.
func (p *process) usage() (usage, error) {
	dir := "/proc/" + strconv.Itoa(p.command.Process.Pid)
	stat, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return usage{}, fmt.Errorf("usage of %s: %w", p.name, err)
	}
	status, err := os.ReadFile(dir + "/status")
	if err != nil {
		return usage{}, fmt.Errorf("usage of %s: %w", p.name, err)
	}
	used, err := parseUsage(string(stat), string(status))
	if err != nil {
		return usage{}, fmt.Errorf("usage of %s: %w", p.name, err)
	}
	return used, nil
}

// parseUsage parses the files stat and status of a process in /proc.
func parseUsage(stat, status string) (usage, error) {
	const ticksPerSecond = 100 // USER_HZ, on every architecture of Linux that Go builds for
	// The program's name in parentheses may contain any character.
	_, rest, found := strings.Cut(stat[strings.LastIndex(stat, ")")+1:], " ")
	fields := strings.Fields(rest)
	if !found || len(fields) < 13 {
		return usage{}, fmt.Errorf("stat is %q", stat)
	}
	user, err := strconv.ParseUint(fields[11], 10, 64)
	if err != nil {
		return usage{}, err
	}
	system, err := strconv.ParseUint(fields[12], 10, 64)
	if err != nil {
		return usage{}, err
	}
	used := usage{CPUSeconds: float64(user+system) / ticksPerSecond}
	for _, line := range strings.Split(status, "\n") {
		name, value, _ := strings.Cut(line, ":")
		into := map[string]*float64{"VmRSS": &used.ResidentMiB, "VmHWM": &used.PeakMiB}[name]
		if into == nil {
			continue
		}
		kib, err := strconv.ParseFloat(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 64)
		if err != nil {
			return usage{}, err
		}
		*into = kib / 1024
	}
	if used.ResidentMiB == 0 {
		return usage{}, fmt.Errorf("status has no VmRSS")
	}
	return used, nil
}
