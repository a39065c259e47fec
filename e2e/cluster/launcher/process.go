package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process identifies a process uniquely. The kernel can reuse a PID, but not with the same start
// time in the same boot.
type process struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot, as in /proc/PID/stat
	Boot  string `json:"boot"`
}

// parseStat parses /proc/PID/stat. It returns whether the process has exited, and its start time. A
// process that has exited but is not reaped counts as exited. The second field, the program's name,
// may contain any character.
func parseStat(stat string) (ended bool, start uint64, err error) {
	end := strings.LastIndexByte(stat, ')')
	if end < 0 {
		return false, 0, fmt.Errorf("not a process's stat: %q", stat)
	}
	fields := strings.Fields(stat[end+1:]) // starts at the third field
	if len(fields) < 20 || len(fields[0]) != 1 {
		return false, 0, fmt.Errorf("not a process's stat: %q", stat)
	}
	start, err = strconv.ParseUint(fields[19], 10, 64)
	// A zombie with more than one thread has not exited: other threads of a killed process may still
	// have open sockets.
	ended = fields[0] == "X" || fields[0] == "Z" && fields[17] == "1"
	return ended, start, err
}

func bootID() (string, error) {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(id)), err
}

// identify returns the running process with this id.
func identify(pid int) (process, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return process{}, err
	}
	_, start, err := parseStat(string(stat))
	if err != nil {
		return process{}, err
	}
	boot, err := bootID()
	return process{PID: pid, Start: start, Boot: boot}, err
}

// isRunning reports whether the process is running. A zombie does not count as running.
func (p process) isRunning() bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID))
	if err != nil {
		return false
	}
	ended, start, err := parseStat(string(stat))
	if err != nil || ended || start != p.Start {
		return false
	}
	boot, err := bootID()
	return err == nil && boot == p.Boot
}

// signal sends a signal to the process. It never sends a signal to another process with the same
// PID.
func (p process) signal(number unix.Signal) error {
	descriptor, err := p.open()
	if err != nil || descriptor < 0 {
		return err
	}
	defer unix.Close(descriptor)
	if err := unix.PidfdSendSignal(descriptor, number, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("signal process %d: %w", p.PID, err)
	}
	return nil
}

// open returns a pidfd, or -1 if the process has exited.
func (p process) open() (int, error) {
	descriptor, err := unix.PidfdOpen(p.PID, 0)
	// New kernels return ENOENT for the PID of a process that is being reaped, and for the ID of a
	// thread.
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.ENOENT) {
		return -1, nil
	} else if err != nil {
		return -1, fmt.Errorf("open process %d: %w", p.PID, err)
	}
	// While the descriptor is open, it refers to the same process, so one check is enough.
	if !p.isRunning() {
		unix.Close(descriptor)
		return -1, nil
	}
	return descriptor, nil
}

// waitUntilExited waits until the process has exited.
func (p process) waitUntilExited(ctx context.Context) error {
	descriptor, err := p.open()
	if err != nil || descriptor < 0 {
		return err
	}
	defer unix.Close(descriptor)
	for {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("process %d still runs: %w", p.PID, err)
		}
		// The descriptor becomes readable when the process exits, even if the process is not reaped.
		ready, err := unix.Poll([]unix.PollFd{{Fd: int32(descriptor), Events: unix.POLLIN}}, 100)
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if ready > 0 {
			return nil
		}
	}
}

// spawnSpec describes how to start a component.
type spawnSpec struct {
	Argv        []string
	Env         []string
	Log         string // file to append to
	ProcessFile string
	Cgroup      string
	// PID of the node whose namespaces the component joins, or 0 for the machine's namespaces.
	Node int
}

// start starts a component. It uses a temporary process that joins the cgroups and namespaces,
// starts the component, writes the component's process file, and exits.
func (s spawnSpec) start(ctx context.Context) error {
	input, err := json.Marshal(s)
	if err != nil {
		return err
	}
	command, err := selfCommand(ctx, commandSpawn)
	if err != nil {
		return err
	}
	command.Stdin = bytes.NewReader(input)
	var stderr bytes.Buffer
	command.Stderr = &stderr
	if err := command.Run(); err != nil {
		return fmt.Errorf("start %s: %w: %s", s.Argv[0], err, strings.TrimSpace(stderr.String()))
	}
	return nil
}

// selfCommand returns a command that runs this program with other arguments.
func selfCommand(ctx context.Context, arguments ...string) (*exec.Cmd, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return exec.CommandContext(ctx, program, arguments...), nil
}

// spawn runs in the temporary process that spawnSpec.start creates.
func spawn(s spawnSpec) error {
	log, err := os.OpenFile(s.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	// Open this directory and /proc before joining the namespaces, because their paths do not refer to
	// the machine's directories in the node's namespaces.
	record, err := os.Open(filepath.Dir(s.ProcessFile))
	if err != nil {
		return err
	}
	defer record.Close()
	fmt.Fprintf(log, "--- %s %s\n", time.Now().UTC().Format(time.RFC3339), strings.Join(s.Argv, " "))
	machineProc, err := os.Open("/proc")
	if err != nil {
		return err
	}
	defer machineProc.Close()
	if err := enterNamespaces(s.Cgroup, s.Node); err != nil {
		return err
	}
	command := exec.Command(s.Argv[0], s.Argv[1:]...)
	command.Env, command.Dir = s.Env, "/"
	command.Stdout, command.Stderr = log, log
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := command.Start(); err != nil {
		return err
	}
	// This PID is valid on the machine, because the temporary process is still in the machine's PID
	// namespace.
	stat, err := readAt(machineProc, fmt.Sprintf("%d/stat", command.Process.Pid))
	if err != nil {
		return err
	}
	_, start, err := parseStat(string(stat))
	if err != nil {
		return err
	}
	boot, err := readAt(machineProc, "sys/kernel/random/boot_id")
	if err != nil {
		return err
	}
	return writeAt(record, filepath.Base(s.ProcessFile), process{PID: command.Process.Pid, Start: start, Boot: strings.TrimSpace(string(boot))})
}

func readAt(dir *os.File, path string) ([]byte, error) {
	descriptor, err := unix.Openat(int(dir.Fd()), path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: filepath.Join(dir.Name(), path), Err: err}
	}
	file := os.NewFile(uintptr(descriptor), path)
	defer file.Close()
	var content bytes.Buffer
	_, err = content.ReadFrom(file)
	return content.Bytes(), err
}

// writeAt replaces a file in the directory atomically.
func writeAt(dir *os.File, name string, value any) error {
	content, err := json.Marshal(value)
	if err != nil {
		return err
	}
	temporary := "." + name + ".writing"
	descriptor, err := unix.Openat(int(dir.Fd()), temporary, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &fs.PathError{Op: "create", Path: filepath.Join(dir.Name(), temporary), Err: err}
	}
	file := os.NewFile(uintptr(descriptor), temporary)
	_, err = file.Write(content)
	if err := errors.Join(err, file.Close()); err != nil {
		return err
	}
	return unix.Renameat(int(dir.Fd()), temporary, int(dir.Fd()), name)
}

// enterNamespaces moves this thread to a cgroup in every hierarchy, and to the namespaces of a
// process. The change is permanent, and children that start later inherit it.
func enterNamespaces(cgroup string, pid int) error {
	if err := joinCgroup(cgroup); err != nil {
		return err
	}
	if pid == 0 {
		return nil
	}
	kinds := []struct {
		file string
		flag int
	}{
		{"cgroup", unix.CLONE_NEWCGROUP}, {"ipc", unix.CLONE_NEWIPC}, {"uts", unix.CLONE_NEWUTS},
		{"net", unix.CLONE_NEWNET}, {"pid", unix.CLONE_NEWPID}, {"mnt", unix.CLONE_NEWNS},
	}
	descriptors := make([]int, len(kinds))
	for i, kind := range kinds {
		descriptor, err := unix.Open(fmt.Sprintf("/proc/%d/ns/%s", pid, kind.file), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("namespace %s of process %d: %w", kind.file, pid, err)
		}
		defer unix.Close(descriptor)
		descriptors[i] = descriptor
	}
	// A thread that shares its root directory with other threads cannot join a mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	for i, kind := range kinds {
		if err := unix.Setns(descriptors[i], kind.flag); err != nil {
			return fmt.Errorf("join namespace %s: %w", kind.file, err)
		}
	}
	return nil
}

// nodeEnv is the environment of programs on a node.
func (l layout) nodeEnv() []string {
	return []string{"PATH=" + nodePath, "HOME=/root", "LANG=C.UTF-8", "CONTAINERD_ADDRESS=" + containerdSocket, l.marker()}
}

// execInNode runs a command on a node with this process's input and output, and exits with its
// status.
func (c *cluster) execInNode(ctx context.Context, name string, argv []string) error {
	holder, err := c.nodeProcess(name)
	if err != nil {
		return err
	}
	env := append(c.layout.nodeEnv(), "CONTAINERD_NAMESPACE=k8s.io")
	for _, kept := range []string{"TERM", "RUST_LOG", "RUST_BACKTRACE"} {
		if value, ok := os.LookupEnv(kept); ok {
			env = append(env, kept+"="+value)
		}
	}
	if err := enterNamespaces(c.layout.cgroup(name)+nodeLeaf(), holder.PID); err != nil {
		return err
	}
	if err := os.Setenv("PATH", nodePath); err != nil {
		return err
	}
	path, err := lookPath(argv[0])
	if err != nil {
		return err
	}
	command := exec.Command(path, argv[1:]...)
	command.Args[0] = argv[0]
	command.Env, command.Dir = env, "/"
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT)
	defer signal.Stop(signals)
	if err := command.Start(); err != nil {
		return err
	}
	go func() {
		for received := range signals {
			_ = command.Process.Signal(received)
		}
	}()
	err = command.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		status := exit.Sys().(syscall.WaitStatus)
		if status.Signaled() {
			return exitCode(128 + int(status.Signal()))
		}
		return exitCode(status.ExitStatus())
	}
	return err
}

// lookPath does the same as exec.LookPath, with the error message of a shell.
func lookPath(program string) (string, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return "", fmt.Errorf("%s: command not found", program)
	}
	return path, nil
}
