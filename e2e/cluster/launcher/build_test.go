package main

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := writeFile(path, []byte(content), 0o755); err != nil {
		t.Fatal(err)
	}
}

// smallModule writes a module with one program, and returns the unit that builds the program.
func smallModule(t *testing.T) (source string, u unit) {
	t.Helper()
	source = t.TempDir()
	write(t, source+"/m/go.mod", "module example.org/m\n\ngo 1.26\n")
	write(t, source+"/m/go.sum", "")
	write(t, source+"/m/main.go", "package main\n\nfunc main() {}\n")
	return source, unit{name: "small", dir: "m", packages: []string{"."}, links: map[string]string{"other": "m"}, ldflags: "-s"}
}

func testCacheKey(t *testing.T, u unit, source, version string) string {
	t.Helper()
	key, err := cacheKey(u, source, version)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func TestCacheKeyDependsOnAllInputs(t *testing.T) {
	source, u := smallModule(t)
	first := testCacheKey(t, u, source, "go1")
	if again := testCacheKey(t, u, source, "go1"); again != first {
		t.Errorf("equal inputs give %s and %s", first, again)
	}
	write(t, source+"/m/main_test.go", "package main\n")
	write(t, source+"/m/README.md", "x")
	if again := testCacheKey(t, u, source, "go1"); again != first {
		t.Error("a test or a text file changes the key")
	}
	seen := map[string]string{first: "the first"}
	check := func(what, key string) {
		t.Helper()
		if other, ok := seen[key]; ok {
			t.Errorf("%s: the key of %s", what, other)
		}
		seen[key] = what
	}
	check("another Go", testCacheKey(t, u, source, "go2"))
	flags := u
	flags.ldflags = "-w"
	check("other flags", testCacheKey(t, flags, source, "go1"))
	links := u
	links.links = nil
	check("other links", testCacheKey(t, links, source, "go1"))
	write(t, source+"/m/go.sum", "example.org/x v1.0.0 h1:x=\n")
	check("another go.sum", testCacheKey(t, u, source, "go1"))
	write(t, source+"/m/second.go", "package main\n")
	last := testCacheKey(t, u, source, "go1")
	check("another source", last)
	write(t, source+"/m/versions/1/go.mod", "module example.org/m\n\ngo 1.25\n")
	write(t, source+"/m/versions/1/go.sum", "")
	if again := testCacheKey(t, u, source, "go1"); again != last {
		t.Error("the go.mod of another version changes the key")
	}
	version := u
	version.modfile = "versions/1/go.mod"
	check("another go.mod", testCacheKey(t, version, source, "go1"))
	write(t, source+"/m/versions/1/go.sum", "example.org/y v1.0.0 h1:y=\n")
	check("another go.sum beside another go.mod", testCacheKey(t, version, source, "go1"))
}

func TestContainerdsVersionMatchesTheModule(t *testing.T) {
	content, err := os.ReadFile("../containerd/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if line := "github.com/containerd/containerd/v2 " + containerdVersion; !strings.Contains(string(content), line+"\n") {
		t.Errorf("containerd/go.mod has no %q", line)
	}
}

func TestUnitIsBuiltWithItsModfile(t *testing.T) {
	source, u := smallModule(t)
	// Go names the program after the module.
	write(t, source+"/m/versions/1/go.mod", "module example.org/other\n\ngo 1.26\n")
	write(t, source+"/m/versions/1/go.sum", "")
	u.modfile, u.links = "versions/1/go.mod", nil
	dir := filepath.Join(t.TempDir(), "small-1")
	if err := u.ensure(context.Background(), source, dir, newProgress(io.Discard)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "other")); err != nil {
		t.Errorf("the unit was built with another go.mod: %v", err)
	}
}

func TestEnsureBuildsOnceForConcurrentCallers(t *testing.T) {
	source, u := smallModule(t)
	dir := filepath.Join(t.TempDir(), "cache", "small-1")
	var said strings.Builder
	p := newProgress(&said) // serializes writes
	var group sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		group.Go(func() { errs[i] = u.ensure(context.Background(), source, dir, p) })
	}
	group.Wait()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(said.String(), "built small"); n != 1 {
		t.Errorf("built %d times:\n%s", n, said.String())
	}
	for _, file := range []string{"m", "other"} {
		if info, err := os.Stat(filepath.Join(dir, file)); err != nil || info.Mode()&0o111 == 0 {
			t.Errorf("%s: %v", file, err)
		}
	}
}

func TestEnsureReportsCompileErrors(t *testing.T) {
	source, u := smallModule(t)
	write(t, source+"/m/main.go", "package main\n\nfunc main() { undefinedThing() }\n")
	dir := filepath.Join(t.TempDir(), "small-1")
	err := u.ensure(context.Background(), source, dir, newProgress(io.Discard))
	if err == nil || !strings.Contains(err.Error(), "undefinedThing") {
		t.Errorf("got %v", err)
	}
	checkOnlyLockRemains(t, filepath.Dir(dir))
}

func TestInterruptedBuildLeavesNoFiles(t *testing.T) {
	source, u := smallModule(t)
	// This compiler writes half of the program and then hangs, together with a child process.
	fake := t.TempDir()
	started := filepath.Join(fake, "started")
	write(t, fake+"/go", `#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo half >"$2/m"
echo package/one >&2
sleep 1000 &
: >`+started+`
wait
`)
	t.Setenv("PATH", fake+":"+os.Getenv("PATH"))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	dir := filepath.Join(t.TempDir(), "small-1")
	done := make(chan error)
	go func() { done <- u.ensure(ctx, source, dir, newProgress(io.Discard)) }()
	for {
		if _, err := os.Stat(started); err == nil {
			break
		}
		select {
		case err := <-done:
			t.Fatalf("exited early: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	cancel()
	if err := <-done; err == nil || !strings.Contains(err.Error(), "interrupted") {
		t.Errorf("got %v", err)
	}
	checkOnlyLockRemains(t, filepath.Dir(dir))
}

func TestEnsureRemovesFilesOfAKilledBuild(t *testing.T) {
	source, u := smallModule(t)
	cache := t.TempDir()
	write(t, cache+"/.building-small-123/m", "half")
	dir := filepath.Join(cache, "small-1")
	if err := u.ensure(context.Background(), source, dir, newProgress(io.Discard)); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(cache + "/.building-small-123"); err == nil {
		t.Error("the stale directory still exists")
	}
}

func checkOnlyLockRemains(t *testing.T, cache string) {
	t.Helper()
	entries, err := os.ReadDir(cache)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if entry.Name() != "small.lock" {
			t.Errorf("%s was left in the cache", entry.Name())
		}
	}
}

func TestBuildLogReportsTheCurrentPackage(t *testing.T) {
	var log buildLog
	if got := log.now(); got != "starting" {
		t.Errorf("initially %q", got)
	}
	log.follow(strings.NewReader("go: downloading example.org/a v1.0.0\n"))
	if got := log.now(); !strings.Contains(got, "downloading") {
		t.Errorf("during the download %q", got)
	}
	log.follow(strings.NewReader("example.org/a\nexample.org/b\n"))
	if got := log.now(); got != "2 packages, at example.org/b" {
		t.Errorf("during the build %q", got)
	}
}

func TestLockIsReleasedByItsHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	unlock, err := lockFile(context.Background(), path, func() { t.Error("no process holds the lock") })
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if _, err := lockFile(ctx, path, cancel); err == nil {
		t.Fatal("two processes hold the lock")
	}
	second, err := lockFile(context.Background(), path, unlock)
	if err != nil {
		t.Fatal(err)
	}
	second()
}

func TestLockOnARemovedFileExcludesNoProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dir", "lock")
	first, err := lockFile(context.Background(), path, func() {})
	if err != nil {
		t.Fatal(err)
	}
	defer first()
	if err := os.RemoveAll(filepath.Dir(path)); err != nil {
		t.Fatal(err)
	}
	second, err := lockFile(context.Background(), path, func() { t.Error("the removed file locks") })
	if err != nil {
		t.Fatal(err)
	}
	defer second()
	if file, err := tryLock(path); err != nil || file != nil {
		t.Errorf("two processes hold the lock: %v, %v", file, err)
	}
}

func TestRemovedFileIsNotAtItsPath(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if !isAt(file, path) {
		t.Error("a new file is not at its path")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if isAt(file, path) {
		t.Error("a removed file is at its path")
	}
	write(t, path, "another")
	if isAt(file, path) {
		t.Error("a replaced file is at its path")
	}
}
