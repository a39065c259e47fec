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

// process is a program that was started here and ends with this one.
type process struct {
	name     string
	log      string
	command  *exec.Cmd
	stopping atomic.Bool
	done     chan struct{}
	err      error // after done
}

// toStart are commands for the thread that starts all of them.
var toStart = func() chan func() {
	queue := make(chan func())
	go func() {
		// A child gets its signal of a parent's death when the thread ends that started it: this one
		// never does.
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
	// Not in the terminal's group: an interrupt is for this process, which then ends the others in
	// order.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	toStart <- func() { started <- command.Start() }
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

// stop ends the process and waits for its end.
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

// usage is what a process has used of the machine.
type usage struct {
	CPUSeconds  float64 `json:"cpuSeconds"`
	ResidentMiB float64 `json:"residentMiB"`
	PeakMiB     float64 `json:"peakMiB"`
}

// usage reads it; CPU since the process began.
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

// parseUsage reads a process's files stat and status in /proc.
func parseUsage(stat, status string) (usage, error) {
	const ticksPerSecond = 100 // USER_HZ, on every architecture of Linux that Go builds for
	// The name, in brackets, may hold anything.
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
