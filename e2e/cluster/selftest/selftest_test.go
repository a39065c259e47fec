//go:build selftest

// Package selftest creates, uses, breaks and removes a local cluster. The tests need root, and no
// other cluster may run on the machine. Run them with go test -tags selftest -count 1 -v ./selftest
package selftest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const (
	patience = 2 * time.Minute
	state    = "/var/lib/cleave-e2e/selftest"
	image    = "localhost/selftest:dev"
)

// result contains a program's output and exit status.
type result struct {
	stdout, stderr string
	err            error
}

func execute(input string, argv ...string) result {
	ctx, cancel := context.WithTimeout(context.Background(), 5*patience)
	defer cancel()
	command := exec.CommandContext(ctx, argv[0], argv[1:]...)
	command.Stdin = strings.NewReader(input)
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	err := command.Run()
	return result{strings.TrimSpace(stdout.String()), strings.TrimSpace(stderr.String()), err}
}

// must runs a program, fails the test if the program fails, and returns its output.
func must(t *testing.T, argv ...string) string {
	t.Helper()
	r := execute("", argv...)
	if r.err != nil {
		t.Fatalf("%s: %v\n%s\n%s", strings.Join(argv, " "), r.err, r.stdout, r.stderr)
	}
	return r.stdout
}

func clusterArgv(arguments ...string) []string {
	return append([]string{"../cluster", "--name", "selftest"}, arguments...)
}

func cluster(t *testing.T, arguments ...string) string {
	t.Helper()
	return must(t, clusterArgv(arguments...)...)
}

func kubectlArgv(arguments ...string) []string {
	return append([]string{state + "/bin/kubectl", "--kubeconfig", state + "/kubeconfig"}, arguments...)
}

func kubectl(t *testing.T, arguments ...string) string {
	t.Helper()
	return must(t, kubectlArgv(arguments...)...)
}

// eventually runs a program repeatedly until it prints the desired text.
func eventually(t *testing.T, want string, argv ...string) {
	t.Helper()
	var last result
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		if last = execute("", argv...); last.err == nil && strings.Contains(last.stdout, want) {
			return
		}
	}
	t.Fatalf("%s: timed out waiting for %q; last result %v\n%s\n%s", strings.Join(argv, " "), want, last.err, last.stdout, last.stderr)
}

// componentPIDs returns the PIDs of the running components.
func componentPIDs(t *testing.T) map[string]string {
	t.Helper()
	found := make(map[string]string)
	for _, line := range strings.Split(execute("", clusterArgv("status")...).stdout, "\n")[1:] {
		fields := strings.Fields(line)
		if len(fields) > 2 && fields[1] == "running" {
			found[fields[0]] = fields[2]
		}
	}
	return found
}

func startPod(t *testing.T, name, node, command string) {
	t.Helper()
	manifest := fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: %s, labels: {pod: %s}}
spec:
  terminationGracePeriodSeconds: 0
  tolerations: [{operator: Exists}]
  nodeSelector: {kubernetes.io/hostname: %s}
  containers:
  - name: main
    image: %s
    command: [/bin/sh, -c, %q]
    resources: {requests: {cpu: 10m}, limits: {memory: 64Mi}}
    volumeMounts: [{name: kubelet, mountPath: /kubelet}]
  volumes: [{name: kubelet, hostPath: {path: /var/lib/kubelet}}]
`, name, name, node, image, command)
	if r := execute(manifest, kubectlArgv("apply", "-f", "-")...); r.err != nil {
		t.Fatalf("apply %s: %s", name, r.stderr)
	}
}

func runPod(t *testing.T, name, node, command string) {
	t.Helper()
	startPod(t, name, node, command)
	eventually(t, "condition met", kubectlArgv("wait", "--for=condition=Ready", "pod/"+name, "--timeout=1s")...)
}

const idle = "exec sleep 1000000"

// machineProperties returns the properties of the machine that a cluster must not change.
func machineProperties(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, argv := range [][]string{
		{"sh", "-c", "iptables-save | grep -v '^#' | sed 's/\\[.*//'"},
		{"sh", "-c", "cut -d' ' -f 5 /proc/self/mountinfo | sort"},
		{"sh", "-c", "ls /sys/class/net"},
		{"sh", "-c", "ls -d /etc/cni /etc/cdi /var/run/cdi /run/containerd /var/lib/kubelet /var/lib/containerd /opt/cni /opt/simgpu /var/lib/cleave-e2e/* 2>/dev/null || true"},
		{"sh", "-c", "cat /proc/sys/vm/overcommit_memory /proc/sys/kernel/panic /proc/sys/kernel/panic_on_oops /proc/sys/net/ipv4/ip_forward"},
		{"sh", "-c", "find /sys/fs/cgroup -maxdepth 3 -type d -name '*cleave-e2e*' -o -maxdepth 3 -type d -name kubepods"},
	} {
		fmt.Fprintf(&all, "# %s\n%s\n", strings.Join(argv, " "), must(t, argv...))
	}
	return all.String()
}

// testAnotherCluster runs a second cluster, which must not affect the first.
func testAnotherCluster(t *testing.T) {
	argv := func(arguments ...string) []string {
		return append([]string{"../cluster", "--name", "another"}, arguments...)
	}
	before, nodes := componentPIDs(t), cluster(t, "node", "list")
	t.Cleanup(func() {
		if r := execute("", argv("down")...); r.err != nil {
			t.Errorf("down: %v\n%s", r.err, r.stderr)
		}
	})
	must(t, argv("up", "--network-policies")...)
	own := must(t, argv("node", "list")...)
	if !strings.Contains(nodes, "\t10.203.0.11\t") || !strings.Contains(own, "\t10.206.0.11\t") {
		t.Errorf("nodes of the first cluster:\n%s\nand of the other:\n%s", nodes, own)
	}
	ready := []string{"wait", "--for=condition=Ready", "node/node1", "--timeout=60s"}
	kubectl(t, ready...)
	must(t, append([]string{state + "/bin/kubectl", "--kubeconfig", "/var/lib/cleave-e2e/another/kubeconfig"}, ready...)...)
	// A cluster of the same name is refused, because both would have the same cgroup.
	same := execute("", "../cluster", "--name", "selftest", "--state", state+"-elsewhere", "up")
	if same.err == nil || !strings.Contains(same.stderr, state+": remove it first") {
		t.Errorf("a cluster of the same name: %v\n%s", same.err, same.stderr)
	}
	must(t, argv("down")...)
	if left := must(t, argv("leftovers")...); left != "" {
		t.Errorf("left over by the other cluster:\n%s", left)
	}
	if after := componentPIDs(t); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("processes of the first cluster %v, then %v", before, after)
	}
	kubectl(t, ready...)
	runPod(t, "after-another", "node1", idle)
	kubectl(t, "delete", "pod", "after-another", "--wait=false")
}

// client is the path of the client program, which testImage builds.
var client string

func TestCluster(t *testing.T) {
	client = filepath.Join(t.TempDir(), "client")
	cluster(t, "down") // after an interrupted run
	before := machineProperties(t)
	t.Cleanup(func() {
		if r := execute("", clusterArgv("down")...); r.err != nil {
			t.Errorf("down: %v\n%s", r.err, r.stderr)
		}
	})

	ok := t.Run("up", func(t *testing.T) {
		cluster(t, "build")
		start := time.Now()
		cluster(t, "up")
		t.Logf("from no cluster to Ready: %.1f s", time.Since(start).Seconds())
		first := componentPIDs(t)
		start = time.Now()
		cluster(t, "up")
		t.Logf("up again: %.1f s", time.Since(start).Seconds())
		if again := componentPIDs(t); len(first) != 8 || fmt.Sprint(again) != fmt.Sprint(first) {
			t.Errorf("processes %v, then %v", first, again)
		}
		if found := execute("", clusterArgv("leftovers")...); found.err == nil || !strings.Contains(found.stdout, "kubelet") {
			t.Errorf("leftovers of a running cluster: %v\n%s", found.err, found.stdout)
		}
	})
	if !ok {
		t.FailNow()
	}
	for _, test := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"image", testImage}, {"pod", testPod}, {"cdi", testCDI}, {"admission", testAdmissionPolicies}, {"second node", testSecondNode},
		{"components", testComponents}, {"power cut", testPowerCut}, {"driver root", testDriverRoot},
		{"node add and remove", testNodeAddRemove}, {"another cluster", testAnotherCluster}, {"errors", testErrors}, {"interrupted", testInterruptedUp},
	} {
		if !t.Run(test.name, test.run) {
			t.FailNow()
		}
	}
	t.Run("down", func(t *testing.T) {
		cluster(t, "down")
		if left := cluster(t, "leftovers"); left != "" {
			t.Errorf("left over:\n%s", left)
		}
		if after := machineProperties(t); after != before {
			t.Errorf("the machine before:\n%s\nand after:\n%s", before, after)
		}
		cluster(t, "down") // again, without a cluster
		if _, err := os.Stat(state + ".lock"); err == nil {
			t.Error("the lock file still exists")
		}
	})
}

func testImage(t *testing.T) {
	dir := t.TempDir()
	build := exec.Command("go", "build", "-o", client, "./client")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	// Use a dynamically linked program, which runs only if its libraries are added.
	must(t, clusterArgv("image", "build", "--tag", image, "--shell", "--ldd", "--dir", "/tmp:1777",
		"--add", client+":/usr/bin/client", "--add", "/usr/bin/env:/usr/bin/dynamic", "--entrypoint", "/bin/sh", "-o", dir+"/image.tar")...)
	cluster(t, "image", "import", dir+"/image.tar")
}

func testPod(t *testing.T) {
	runPod(t, "one", "node1", "echo hello; "+idle)
	if got := kubectl(t, "logs", "one"); got != "hello" {
		t.Errorf("logs: %q", got)
	}
	if got := kubectl(t, "exec", "one", "--", "/usr/bin/dynamic", "echo", "linked"); got != "linked" {
		t.Errorf("exec: %q", got)
	}
	// This query succeeds only if the pod's token, the service's address and the node's packet filter
	// work.
	if got := kubectl(t, "exec", "one", "--", "client"); got != "system:serviceaccount:default:default" {
		t.Errorf("the API server identifies the pod as %q", got)
	}
	uid := kubectl(t, "get", "pod", "one", "-o", "jsonpath={.metadata.uid}")
	inPod := kubectl(t, "exec", "one", "--", "cat", "/proc/self/cgroup")
	onNode := cluster(t, "exec-node", "node1", "sh", "-c", "cat /proc/$(pgrep -f 'sleep 1000000' | head -n 1)/cgroup")
	for where, got := range map[string]string{"in the pod": inPod, "on the node": onNode} {
		if !strings.Contains(got, "/kubepods/burstable/pod"+uid) && !strings.Contains(got, "0::/\n") && got != "0::/" {
			t.Errorf("cgroups %s:\n%s", where, got)
		}
	}
	limits := cluster(t, "exec-node", "node1", "sh", "-c",
		"cat $(find /sys/fs/cgroup -path '*burstable/pod"+uid+"/memory.limit_in_bytes' -o -path '*burstable/pod"+uid+"/memory.max')")
	if limits != fmt.Sprint(64<<20) {
		t.Errorf("the pod's memory limit: %q", limits)
	}
	if warnings := kubectl(t, "get", "events", "--field-selector", "involvedObject.name=one,type=Warning", "-o", "name"); warnings != "" {
		t.Errorf("warnings about a plain pod: %s", kubectl(t, "get", "events"))
	}
	labels := kubectl(t, "get", "node", "node1", "-o", "jsonpath={.metadata.labels}")
	for _, label := range []string{`"kubernetes.io/hostname":"node1"`, `"kubernetes.io/os":"linux"`, `"kubernetes.io/arch"`} {
		if !strings.Contains(labels, label) {
			t.Errorf("labels %s without %s", labels, label)
		}
	}
}

func testCDI(t *testing.T) {
	for dir, device := range map[string]string{"/var/run/cdi": "one", "/etc/cdi": "two"} {
		spec := fmt.Sprintf(`{"cdiVersion":"0.6.0","kind":"cleave.dev/selftest-%[1]s","devices":[{"name":"%[1]s","containerEdits":{"env":["CDI_DEVICE=%[1]s"]}}]}`, device)
		if r := execute(spec, clusterArgv("exec-node", "node1", "sh", "-c", "cat >"+dir+"/"+device+".json")...); r.err != nil {
			t.Fatal(r.stderr)
		}
		got := cluster(t, "exec-node", "node1", "ctr", "run", "--rm", "--device", "cleave.dev/selftest-"+device+"="+device, image, "cdi-"+device, "env")
		if !strings.Contains(got, "CDI_DEVICE="+device) {
			t.Errorf("%s: a container with the device has %q", dir, got)
		}
	}
	// Check the configuration that containerd uses for the kubelet.
	config := cluster(t, "exec-node", "node1", "containerd", "--config", "/etc/containerd/config.toml", "config", "dump")
	if !strings.Contains(config, "cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']") {
		t.Errorf("containerd's configuration:\n%s", config)
	}
}

func testAdmissionPolicies(t *testing.T) {
	got := kubectl(t, "api-resources", "--api-group", "admissionregistration.k8s.io", "-o", "name")
	if !strings.Contains(got, "mutatingadmissionpolicies.") || !strings.Contains(kubectl(t, "get", "--raw", "/apis/admissionregistration.k8s.io/v1"), "mutatingadmissionpolicies") {
		t.Errorf("served: %s", got)
	}
}

func testSecondNode(t *testing.T) {
	cluster(t, "up", "--nodes", "2")
	// The new node must have the image, although the image was imported before the node was added.
	runPod(t, "two", "node2", "echo mine >/kubelet/selftest; mkdir /www; echo served >/www/index.html; exec httpd -f -p 80 -h /www")
	if got := kubectl(t, "exec", "one", "--", "sh", "-c", "ls /kubelet/selftest 2>&1 || true"); !strings.Contains(got, "No such file") {
		t.Errorf("node1's pod sees the file of node2's /var/lib/kubelet: %s", got)
	}
	if _, err := os.Stat("/var/lib/kubelet/selftest"); err == nil {
		t.Error("the machine sees the file of node2's /var/lib/kubelet")
	}
	if got, err := os.ReadFile(state + "/nodes/node2/host/var/lib/kubelet/selftest"); err != nil || string(got) != "mine\n" {
		t.Errorf("the node's directory on the machine: %q, %v", got, err)
	}
	for _, n := range []string{"node1", "node2"} {
		cluster(t, "exec-node", n, "test", "-d", "/var/lib/kubelet/device-plugins")
		if got := cluster(t, "exec-node", n, "hostname"); got != n {
			t.Errorf("host name of %s: %q", n, got)
		}
	}
	kubectl(t, "expose", "pod", "two", "--port=80")
	address := kubectl(t, "get", "pod", "two", "-o", "jsonpath={.status.podIP}")
	service := kubectl(t, "get", "service", "two", "-o", "jsonpath={.spec.clusterIP}")
	for _, target := range []string{address, service} {
		url := "http://" + target + "/"
		eventually(t, "served", kubectlArgv("exec", "one", "--", "client", url)...)
		eventually(t, "served", client, url) // from the machine
		// Also send the query from the node itself, as a pod in the host network does.
		must(t, "cp", client, state+"/nodes/node1/host/tmp/client")
		eventually(t, "served", clusterArgv("exec-node", "node1", "/tmp/client", url)...)
	}
}

// untouchedCheck returns a function that fails the test if a container of the pods has changed or
// restarted since this call.
func untouchedCheck(t *testing.T) func() {
	t.Helper()
	const format = "jsonpath={range .items[*]}{.metadata.name} {.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}{\"\\n\"}{end}"
	get := func() string { return kubectl(t, "get", "pods", "one", "two", "-o", format) }
	before := get()
	if len(strings.Split(before, "\n")) != 2 {
		t.Fatalf("pods:\n%s", before)
	}
	return func() {
		t.Helper()
		if after := get(); after != before {
			t.Errorf("pods before:\n%s\nand after:\n%s", before, after)
		}
	}
}

func testComponents(t *testing.T) {
	for i, name := range []string{
		"etcd", "apiserver", "controller-manager", "scheduler", "containerd@node1", "kubelet@node1", "proxy@node1", "kubelet@node2",
	} {
		check := untouchedCheck(t)
		before := componentPIDs(t)[name]
		cluster(t, "kill", name)
		// The process may be a zombie, but must not be running.
		if stat, err := os.ReadFile("/proc/" + before + "/stat"); err == nil && !strings.Contains(string(stat), ") Z ") {
			t.Errorf("%s was killed, but process %s runs: %s", name, before, stat)
		}
		if r := execute("", clusterArgv("status")...); r.err == nil || componentPIDs(t)[name] != "" {
			t.Errorf("%s was killed, but the status is\n%s", name, r.stdout)
		}
		cluster(t, "kill", name) // again, while it does not run
		cluster(t, "start", name)
		cluster(t, "start", name)
		killed := componentPIDs(t)[name]
		cluster(t, "restart", name)
		if after := componentPIDs(t)[name]; after == "" || after == killed || killed == before {
			t.Errorf("%s: process %s, then %s, then %s", name, before, killed, after)
		}
		pod := fmt.Sprintf("after-%d", i)
		runPod(t, pod, "node1", idle)
		kubectl(t, "delete", "pod", pod, "--wait=false")
		check()
	}
	cluster(t, "stop", "kubelet@node2")
	cluster(t, "stop", "kubelet@node2")
	cluster(t, "up", "--nodes", "2")
	cluster(t, "status")
	if got := cluster(t, "logs", "scheduler", "-n", "1"); got == "" {
		t.Error("the scheduler's log is empty")
	}
}

func testPowerCut(t *testing.T) {
	cluster(t, "kill", "node@node2")
	for name := range componentPIDs(t) {
		if strings.HasSuffix(name, "@node2") {
			t.Errorf("%s runs on a node without power", name)
		}
	}
	if r := execute("", clusterArgv("exec-node", "node2", "true")...); r.err == nil || !strings.Contains(r.stderr, "node@node2") {
		t.Errorf("a command on it: %v, %s", r.err, r.stderr)
	}
	cluster(t, "exec-node", "node1", "true")
	cluster(t, "start", "node@node2")
	// The node's disk must be unchanged, and its pod must run again.
	cluster(t, "exec-node", "node2", "grep", "mine", "/var/lib/kubelet/selftest")
	eventually(t, "1", kubectlArgv("get", "pod", "two", "-o", "jsonpath={.status.containerStatuses[0].restartCount}")...)
	eventually(t, "condition met", kubectlArgv("wait", "--for=condition=Ready", "pod/two", "--timeout=1s")...)
	cluster(t, "restart", "node@node2")
	eventually(t, "condition met", kubectlArgv("wait", "--for=condition=Ready", "node/node2", "--timeout=1s")...)
}

func testDriverRoot(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/driver", []byte("one"), 0o644); err != nil {
		t.Fatal(err)
	}
	cluster(t, "up", "--nodes", "2", "--driver-root", dir)
	for _, n := range []string{"node1", "node2"} {
		if got := cluster(t, "exec-node", n, "cat", "/opt/simgpu/driver"); got != "one" {
			t.Errorf("%s sees %q", n, got)
		}
		if r := execute("", clusterArgv("exec-node", n, "touch", "/opt/simgpu/x")...); r.err == nil {
			t.Errorf("%s can write to the machine's directory", n)
		}
	}
	cluster(t, "up", "--nodes", "2")
	if got := cluster(t, "exec-node", "node1", "ls", "/opt/simgpu"); got != "" {
		t.Errorf("without a driver root there is %q", got)
	}
	// A device that a test creates must be visible only on its node.
	cluster(t, "exec-node", "node1", "mknod", "-m", "666", "/dev/nvidia0", "c", "1", "3")
	if _, err := os.Stat("/dev/nvidia0"); err == nil {
		t.Error("the machine sees the node's device")
	}
}

func testNodeAddRemove(t *testing.T) {
	cluster(t, "node", "remove", "node2")
	if got := kubectl(t, "get", "nodes", "-o", "name"); got != "node/node1" {
		t.Errorf("nodes: %s", got)
	}
	if _, err := os.Stat(state + "/nodes/node2"); err == nil {
		t.Error("the node's directory still exists")
	}
	cluster(t, "node", "add", "other")
	cluster(t, "node", "add", "other")
	runPod(t, "three", "other", idle)
	if got := kubectl(t, "exec", "three", "--", "client"); got != "system:serviceaccount:default:default" {
		t.Errorf("the API server identifies the pod as %q", got)
	}
	cluster(t, "node", "remove", "other")
}

func testErrors(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		arguments []string
		want      string
	}{
		{[]string{"stop", "kubelt"}, "unknown component"},
		{[]string{"stop", "kubelet@node7"}, "no node"},
		{[]string{"up", "--nodes", "0"}, "--nodes"},
		{[]string{"up", "--driver-root", none}, "--driver-root"},
		{[]string{"node", "remove", "node7"}, "no node"},
		{[]string{"node", "add", "Node_7"}, "node name"},
		{[]string{"exec-node", "node1", "no-such-program"}, "not found"},
		{[]string{"image", "import", none}, "no such file"},
		{[]string{"image", "import", text}, "not an image archive"},
		{[]string{"frobnicate"}, "unknown command"},
		{[]string{"--name", "gone", "status"}, "there is no cluster"},
		{[]string{"--name", "gone", "env"}, "there is no cluster"},
	} {
		if r := execute("", clusterArgv(c.arguments...)...); r.err == nil || !strings.Contains(r.stderr, c.want) {
			t.Errorf("cluster %s: %v, %q; want %q", strings.Join(c.arguments, " "), r.err, r.stderr, c.want)
		}
	}
	if r := execute("", clusterArgv("exec-node", "node1", "sh", "-c", "exit 7")...); r.err == nil || r.err.(*exec.ExitError).ExitCode() != 7 {
		t.Errorf("a command that ends with 7: %v", r.err)
	}
}

// testInterruptedUp interrupts the first up, and checks that the next up completes the cluster.
func testInterruptedUp(t *testing.T) {
	cluster(t, "down")
	argv := clusterArgv("up")
	command := exec.Command(argv[0], argv[1:]...)
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	record := state + "/run/apiserver.json"
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(record); err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the API server was never started")
		}
	}
	// This signal interrupts the launcher, because the script replaces itself with the launcher.
	if err := command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = command.Wait()
	content, err := os.ReadFile(record)
	if err != nil {
		t.Fatal(err)
	}
	var started struct{ PID int }
	if err := json.Unmarshal(content, &started); err != nil {
		t.Fatal(err)
	}
	cluster(t, "up")
	if got := componentPIDs(t)["apiserver"]; got != fmt.Sprint(started.PID) {
		t.Errorf("the running API server, process %d, was replaced: %s", started.PID, got)
	}
	cluster(t, "status")
}
