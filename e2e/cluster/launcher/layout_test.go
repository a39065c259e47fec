package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"strings"
	"testing"
)

func testLayout(t *testing.T) layout {
	t.Helper()
	l, err := newLayout("test", "/var/lib/x")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestNewLayoutRejectsInvalidArguments(t *testing.T) {
	for _, c := range []struct{ name, dir, want string }{
		{"", "", "--name"},
		{"../etc", "", "--name"},
		{"-a", "", "--name"},
		{strings.Repeat("a", 33), "", "--name"},
		{"a", "/" + strings.Repeat("d", 60), "too long"},
	} {
		if _, err := newLayout(c.name, c.dir); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("newLayout(%q, %q): %v, want an error with %q", c.name, c.dir, err, c.want)
		}
	}
	l, err := newLayout("cleave", "")
	if err != nil || l.dir != "/var/lib/cleave-e2e/cleave" {
		t.Errorf("default directory: %q, %v", l.dir, err)
	}
}

func TestShellEnvWorksInAShell(t *testing.T) {
	l := layout{name: "a", dir: "/var/lib/it's here"}
	script := l.shellEnv() + l.shellEnv() + `printf '%s\n' "$KUBECONFIG" "$PATH"`
	command := exec.Command("/bin/sh", "-euc", script)
	command.Env = []string{"PATH=/bin"}
	output, err := command.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	// After the shell has evaluated the commands twice, PATH contains the directory only once.
	if want := "/var/lib/it's here/kubeconfig\n/var/lib/it's here/bin:/bin\n"; string(output) != want {
		t.Errorf("got %q, want %q", output, want)
	}
}

func TestFreeIndexIsTheLowestUnusedIndex(t *testing.T) {
	if got, err := freeIndex([]node{{Index: 1}, {Index: 3}}); got != 2 || err != nil {
		t.Errorf("got %d, %v", got, err)
	}
	full := make([]node, maxNodes)
	for i := range full {
		full[i].Index = i + 1
	}
	if _, err := freeIndex(full); err == nil {
		t.Error("a full cluster accepts another node")
	}
}

func TestParseComponent(t *testing.T) {
	one, two := []node{{Name: "node1"}}, []node{{Name: "node1"}, {Name: "node2"}}
	for _, c := range []struct {
		text  string
		nodes []node
		want  string // the component, or a part of the error
	}{
		{"apiserver", two, "apiserver"},
		{"kube-scheduler", two, "scheduler"},
		{"kubelet", one, "kubelet@node1"},
		{"kubelet", two, "2 nodes"},
		{"containerd@node2", two, "containerd@node2"},
		{"kube-proxy@node2", two, "proxy@node2"},
		{"kubelet@node3", two, "no node"},
		{"etcd@node1", two, "runs once"},
		{"kubelt", one, "unknown component"},
		{"", one, "unknown component"},
	} {
		got, err := parseComponent(c.text, c.nodes)
		text := got.String()
		if err != nil {
			text = err.Error()
		}
		if !strings.Contains(text, c.want) || (err == nil && text != c.want) {
			t.Errorf("parseComponent(%q): %q, want %q", c.text, text, c.want)
		}
	}
}

func TestEachComponentHasACommandLine(t *testing.T) {
	l := testLayout(t)
	for _, one := range components([]node{{Name: "node1", Index: 1}}, true) {
		if one.kind == kindNode {
			continue
		}
		seen := make(map[string]bool)
		for _, argument := range l.argv(one, binaries{"kube": "/k", "containerd": "/c"}) {
			flag, _, _ := strings.Cut(argument, "=")
			if seen[flag] {
				t.Errorf("%s: %s twice", one, flag)
			}
			seen[flag] = true
		}
		if len(seen) < 2 {
			t.Errorf("%s: %v", one, seen)
		}
	}
}

func TestConfigurationsNameTheNode(t *testing.T) {
	n := node{Name: "node7", Index: 7}
	for what, c := range map[string]struct {
		config object
		want   string
	}{
		"kubelet":                   {kubeletConfig(0, n), `"address":"10.203.0.17"`},
		"quick":                     {kubeletConfig(0, node{StatusSeconds: 2}), `"nodeStatusReportFrequency":"5m0s","nodeStatusUpdateFrequency":"2s"`},
		"proxy":                     {proxyConfig(0, n), `"bindAddress":"10.203.0.17"`},
		"network":                   {networkConfig(0, n), `"subnet":"10.204.7.0/24"`},
		"another cluster's kubelet": {kubeletConfig(1, n), `"address":"10.206.0.17"`},
		"another cluster's network": {networkConfig(1, n), `"subnet":"10.207.7.0/24"`},
	} {
		text, err := json.Marshal(c.config)
		if err != nil || !strings.Contains(string(text), c.want) {
			t.Errorf("%s: %s, %v: want %s", what, text, err, c.want)
		}
	}
}

func TestWriteFileReplacesAtomically(t *testing.T) {
	dir := t.TempDir() + "/a"
	path := dir + "/b"
	for _, content := range []string{"one", "two"} {
		if err := writeFile(path, []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil || string(got) != content {
			t.Fatalf("%q, %v", got, err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("other files: %v, %v", entries, err)
	}
}

func TestNodeReady(t *testing.T) {
	for _, c := range []struct {
		object string
		ready  bool
		fails  bool
	}{
		{`{"status":{"conditions":[{"type":"Ready","status":"True","message":"m"}]}}`, true, false},
		{`{"status":{"conditions":[{"type":"Ready","status":"False","message":"m"}]}}`, false, false},
		{`{"status":{"conditions":[{"type":"DiskPressure","status":"True"}]}}`, false, false},
		{`{}`, false, false},
		{`{"status":`, false, true},
	} {
		ready, reason, err := nodeReady([]byte(c.object))
		if ready != c.ready || (err != nil) != c.fails || (!ready && !c.fails && reason == "") {
			t.Errorf("%s: %v, %q, %v", c.object, ready, reason, err)
		}
	}
}
