package main

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// containerdVersion is the version that containerd reports. A test compares this constant with
// go.mod.
const containerdVersion = "v2.4.2"

// unit is a set of programs that one go build produces. The cache has a directory for each unit.
type unit struct {
	name     string
	dir      string // directory of the Go module, relative to e2e/cluster
	modfile  string // go.mod to build with, relative to dir; "" for dir's own
	packages []string
	links    map[string]string // additional name → program
	ldflags  string
	cgo      bool // whether the programs need a C compiler and the machine's C library
}

// units returns the units that every cluster needs, for this version of Kubernetes.
func units(kube kubernetes) []unit {
	const version = "k8s.io/component-base/version"
	return []unit{
		{
			name: "kube", dir: "kube", modfile: kube.modfile(), packages: []string{"."},
			links: map[string]string{
				"etcd": "kube", "kube-apiserver": "kube", "kube-controller-manager": "kube", "kube-proxy": "kube",
				"kube-scheduler": "kube", "kubectl": "kube", "kubelet": "kube",
			},
			ldflags: fmt.Sprintf("-s -w -X %[1]s.gitVersion=v%[2]s -X %[1]s.gitMajor=1 -X %[1]s.gitMinor=%[3]d -X %[1]s.gitTreeState=clean", version, kube, kube.minor),
		},
		{
			name: "containerd", dir: "containerd", packages: []string{"./containerd", "./containerd-shim-runc-v2"},
			links:   map[string]string{"ctr": "containerd"},
			ldflags: "-s -w -X github.com/containerd/containerd/v2/version.Version=" + containerdVersion,
		},
		{name: "helm", dir: "helm", packages: []string{"."}, ldflags: "-s -w"},
		{name: "pause", dir: ".", packages: []string{"./pause"}, ldflags: "-s -w"},
	}
}

// toolkitUnit contains NVIDIA's container toolkit. Only clusters with `up --toolkit` use it. Its
// programs load NVML.
var toolkitUnit = unit{
	name: "toolkit", dir: "toolkit", ldflags: "-s -w", cgo: true,
	packages: []string{
		toolkitModule + "/cmd/nvidia-cdi-hook", toolkitModule + "/cmd/nvidia-container-runtime",
		toolkitModule + "/cmd/nvidia-container-runtime-hook", toolkitModule + "/cmd/nvidia-ctk",
	},
}

const toolkitModule = "github.com/NVIDIA/nvidia-container-toolkit"

// binaries maps each unit to the directory of its built programs.
type binaries map[string]string

func (b binaries) dirs() []string {
	dirs := make([]string, 0, len(b))
	for _, dir := range b {
		dirs = append(dirs, dir)
	}
	slices.Sort(dirs)
	return dirs
}

// fingerprint identifies a set of programs.
func (b binaries) fingerprint() string { return strings.Join(b.dirs(), "\n") }

// cacheDir returns the directory of built programs. The directory is outside the source tree, so
// that cleaning the tree does not delete the programs.
func cacheDir() (string, error) {
	if dir := os.Getenv("CLEAVE_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no directory for built programs: %w: set CLEAVE_CACHE", err)
	}
	return filepath.Join(dir, "cleave"), nil
}

// sourceVariable is the environment variable with the path of e2e/cluster. The script
// e2e/cluster/cluster sets the variable.
const sourceVariable = "CLEAVE_CLUSTER_SOURCE"

func sourceDir() (string, error) {
	dir := os.Getenv(sourceVariable)
	if dir == "" {
		return "", fmt.Errorf("%s is not set: run e2e/cluster/cluster, which sets it", sourceVariable)
	}
	return dir, nil
}

// cacheKey is a hash of a unit's inputs: the compiler, its options and the module's files. go.sum
// contains the hashes of other modules.
func cacheKey(u unit, source, goVersion string) (string, error) {
	hash := sha256.New()
	fmt.Fprintf(hash, "%s\n%s\n%s\n%q\n%v\n", goVersion, runtime.GOARCH, u.ldflags, u.packages, u.links)
	if u.cgo {
		fmt.Fprintln(hash, "cgo")
	}
	module := filepath.Join(source, u.dir)
	modfile := filepath.Join(module, cmp.Or(u.modfile, "go.mod"))
	files := []string{modfile, filepath.Join(filepath.Dir(modfile), "go.sum")}
	for _, pkg := range u.packages {
		sources, err := filepath.Glob(filepath.Join(module, pkg, "*.go"))
		if err != nil {
			return "", err
		}
		files = append(files, sources...)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		content, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("sources of %s: %w", u.name, err)
		}
		relative, err := filepath.Rel(module, file)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(hash, "%s %d\n", relative, len(content))
		hash.Write(content)
	}
	return hex.EncodeToString(hash.Sum(nil))[:16], nil
}

// programsVariable is the environment variable with the path of a directory that contains prebuilt
// programs.
const programsVariable = "CLEAVE_CLUSTER_PROGRAMS"

// programsIn returns each unit's directory below dir. It fails if a directory lacks one of the
// unit's links.
func programsIn(dir string) (binaries, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	given := make(binaries)
	for _, u := range units(defaultKubernetes) { // all versions have the same names
		given[u.name] = filepath.Join(dir, u.name)
		for link := range u.links {
			if _, err := os.Stat(filepath.Join(given[u.name], link)); err != nil {
				return nil, fmt.Errorf("%s: %w", programsVariable, err)
			}
		}
	}
	// A set of prebuilt programs may omit the toolkit.
	toolkit := filepath.Join(dir, toolkitUnit.name)
	if _, err := os.Stat(filepath.Join(toolkit, "nvidia-container-runtime")); err == nil {
		given[toolkitUnit.name] = toolkit
	}
	return given, nil
}

// buildAll builds the programs that the cache lacks, and returns the directories of all programs.
// If toolkit is true, the programs include NVIDIA's container toolkit. With prebuilt programs,
// buildAll builds nothing.
func buildAll(ctx context.Context, toolkit bool, progress *progress) (binaries, error) {
	wanted := os.Getenv(versionVariable)
	if dir := os.Getenv(programsVariable); dir != "" {
		if wanted != "" {
			return nil, fmt.Errorf("%s and %s are both set: prebuilt programs have one version", versionVariable, programsVariable)
		}
		given, err := programsIn(dir)
		if err == nil && toolkit && given[toolkitUnit.name] == "" {
			err = fmt.Errorf("%s: %s has no container toolkit", programsVariable, dir)
		}
		if !toolkit {
			delete(given, toolkitUnit.name)
		}
		return given, err
	}
	source, err := sourceDir()
	if err != nil {
		return nil, err
	}
	available, err := kubernetesVersions(source)
	if err != nil {
		return nil, err
	}
	kube, err := selectKubernetes(wanted, available)
	if err != nil {
		return nil, err
	}
	cache, err := cacheDir()
	if err != nil {
		return nil, err
	}
	version, err := exec.CommandContext(ctx, "go", "env", "GOVERSION").Output()
	if err != nil {
		return nil, fmt.Errorf("go env GOVERSION: %w", err)
	}
	built := make(binaries)
	wantedUnits := units(kube)
	if toolkit {
		wantedUnits = append(wantedUnits, toolkitUnit)
	}
	for _, u := range wantedUnits {
		key, err := cacheKey(u, source, strings.TrimSpace(string(version)))
		if err != nil {
			return nil, err
		}
		dir := filepath.Join(cache, u.name+"-"+key)
		if err := u.ensure(ctx, source, dir, progress); err != nil {
			return nil, fmt.Errorf("build %s: %w", u.name, err)
		}
		built[u.name] = dir
	}
	return built, nil
}

// ensure builds the unit into dir if dir does not exist. An existing dir is always complete: ensure
// builds into a temporary directory and then renames that directory.
func (u unit) ensure(ctx context.Context, source, dir string, progress *progress) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	cache := filepath.Dir(dir)
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	unlock, err := lockFile(ctx, filepath.Join(cache, u.name+".lock"), func() {
		progress.printf("waiting for another build of %s", u.name)
	})
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	// This process has the lock, so existing directories with such names are from interrupted builds.
	stale, err := filepath.Glob(filepath.Join(cache, ".building-"+u.name+"-*"))
	if err != nil {
		return err
	}
	for _, path := range stale {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	temporary, err := os.MkdirTemp(cache, ".building-"+u.name+"-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temporary)
	if err := os.Chmod(temporary, 0o755); err != nil {
		return err
	}
	if err := u.compile(ctx, filepath.Join(source, u.dir), temporary, progress); err != nil {
		return err
	}
	for link, program := range u.links {
		if err := os.Symlink(program, filepath.Join(temporary, link)); err != nil {
			return err
		}
	}
	return os.Rename(temporary, dir)
}

// compile runs go build and prints progress every ten seconds.
func (u unit) compile(ctx context.Context, module, output string, progress *progress) error {
	start := time.Now()
	progress.printf("building %s (the result will be in %s)", u.name, filepath.Dir(output))
	arguments := []string{"build", "-v", "-trimpath", "-buildvcs=false", "-ldflags", u.ldflags, "-o", output + "/"}
	if u.modfile != "" {
		arguments = append(arguments, "-modfile="+u.modfile)
	}
	arguments = append(arguments, u.packages...)
	command := exec.CommandContext(ctx, "go", arguments...)
	command.Dir = module
	cgo := "CGO_ENABLED=0"
	if u.cgo {
		cgo = "CGO_ENABLED=1"
	}
	command.Env = append(os.Environ(), cgo, "GOWORK=off", "GOFLAGS=")
	// Terminate the whole process group, because go build runs the compilers as child processes.
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	command.Cancel = func() error { return unix.Kill(-command.Process.Pid, unix.SIGTERM) }
	command.WaitDelay = 10 * time.Second
	stderr, err := command.StderrPipe()
	if err != nil {
		return err
	}
	if err := command.Start(); err != nil {
		return err
	}

	var log buildLog
	read := make(chan struct{})
	go func() {
		defer close(read)
		log.follow(stderr)
	}()
	ticker := time.NewTicker(10 * time.Second)
	defer ticker.Stop()
	for running := true; running; {
		select {
		case <-ticker.C:
			progress.printf("building %s, %s: %s", u.name, time.Since(start).Round(time.Second), log.now())
		case <-read:
			running = false
		}
	}
	if err := command.Wait(); err != nil {
		if ctx.Err() != nil {
			return errors.New("interrupted; nothing was left in the cache")
		}
		return fmt.Errorf("go build in %s: %w\n%s", module, err, log.tail())
	}
	progress.printf("built %s in %s", u.name, time.Since(start).Round(time.Second))
	return nil
}

// buildLog collects the output of go build -v: the path of each package, and error messages.
type buildLog struct {
	mutex    sync.Mutex
	packages int
	last     string
	lines    []string // the last lines
}

func (l *buildLog) follow(from io.Reader) {
	scanner := bufio.NewScanner(from)
	for scanner.Scan() {
		l.add(scanner.Text())
	}
	_, _ = io.Copy(io.Discard, from) // drain, so that a line too long for the scanner does not block Go
}

func (l *buildLog) add(line string) {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	l.last = line
	if !strings.ContainsAny(line, " \t") {
		l.packages++
	}
	if l.lines = append(l.lines, line); len(l.lines) > 40 {
		l.lines = l.lines[1:]
	}
}

func (l *buildLog) now() string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	switch {
	case l.last == "":
		return "starting"
	case l.packages == 0:
		return l.last
	default:
		return fmt.Sprintf("%d packages, at %s", l.packages, l.last)
	}
}

func (l *buildLog) tail() string {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return strings.Join(l.lines, "\n")
}

// lockFile locks the file at path until unlock is called or the process exits. If another process
// has the lock, lockFile calls waiting once, and waits. A process that has the lock may remove the
// file.
func lockFile(ctx context.Context, path string, waiting func()) (unlock func(), err error) {
	for first := true; ; first = false {
		file, err := tryLock(path)
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if file != nil {
			return func() { file.Close() }, nil
		}
		if first {
			waiting()
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// tryLock locks the file at path and returns it. If another process has the lock or removed the
// file, tryLock returns nil.
func tryLock(path string) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, ignoreMissing(err) // the holder has just removed the directory
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		file.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, nil
		}
		return nil, err
	}
	// Check the path, because a lock on a removed file excludes no other process.
	if !isAt(file, path) {
		file.Close()
		return nil, nil
	}
	return file, nil
}

// isAt reports whether the open file is the file at path.
func isAt(file *os.File, path string) bool {
	opened, err := file.Stat()
	if err != nil {
		return false
	}
	current, err := os.Stat(path)
	return err == nil && os.SameFile(opened, current)
}

// progress prints lines that begin with the time since the start of the command.
type progress struct {
	mutex sync.Mutex
	out   io.Writer
	start time.Time
}

func newProgress(out io.Writer) *progress { return &progress{out: out, start: time.Now()} }

func (p *progress) printf(format string, arguments ...any) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	fmt.Fprintf(p.out, "%6.1fs  %s\n", time.Since(p.start).Seconds(), fmt.Sprintf(format, arguments...))
}
