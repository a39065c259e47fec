package main

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

func TestSizesDependOnlyOnTheSeed(t *testing.T) {
	first := randomShareCounts(1, 1000)
	if !slices.Equal(first, randomShareCounts(1, 1000)) || slices.Equal(first, randomShareCounts(2, 1000)) {
		t.Error("equal seeds give different sizes")
	}
	if !slices.Equal(first[:10], randomShareCounts(1, 10)) {
		t.Error("more pods change the first ones")
	}
	if slices.Min(first) != 1 || slices.Max(first) != sharesPerGPU {
		t.Errorf("from %d to %d", slices.Min(first), slices.Max(first))
	}
}

func TestPercentileIsANearestRank(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	for p, want := range map[int]float64{1: 1, 50: 50, 99: 99, 100: 100} {
		if got := percentile(hundred, p); got != want {
			t.Errorf("p%d is %v, not %v", p, got, want)
		}
	}
	if got := percentile([]float64{7}, 50); got != 7 {
		t.Errorf("of one value %v", got)
	}
	if got := percentile([]float64{1, 2, 3}, 99); got != 3 {
		t.Errorf("p99 of three is %v", got)
	}
}

func TestUnboundPodsAreOnlyCounted(t *testing.T) {
	start := time.Now()
	l := summarize([]record{
		{sent: start.Add(time.Second), bound: start.Add(2 * time.Second), node: "n"},
		{sent: start, bound: start.Add(4 * time.Second), node: "n"},
		{sent: start},
	})
	if l.Pods != 3 || l.Bound != 2 || l.Seconds != 4 || l.PodsPerSecond != 0.5 || l.P50 != 1000 || l.P99 != 4000 {
		t.Errorf("%+v", l)
	}
	if none := summarize([]record{{sent: start}}); none.Bound != 0 || none.PodsPerSecond != 0 {
		t.Errorf("%+v", none)
	}
}

func TestWritesAreCountedByVerbAndResource(t *testing.T) {
	const text = `# HELP apiserver_request_total n
# TYPE apiserver_request_total counter
apiserver_request_total{code="201",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="",verb="POST",version="v1"} 10
apiserver_request_total{code="409",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="",verb="POST",version="v1"} 2
apiserver_request_total{code="201",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="binding",verb="POST",version="v1"} 9
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="pods",scope="cluster",subresource="",verb="LIST",version="v1"} 99
apiserver_request_total{code="200",component="apiserver",dry_run="",group="coordination.k8s.io",resource="leases",scope="resource",subresource="",verb="PUT",version="v1"} 99
apiserver_request_total{code="201",component="apiserver",dry_run="",group="authorization.k8s.io",resource="subjectaccessreviews",scope="cluster",subresource="",verb="POST",version="v1"} 99
apiserver_request_duration_seconds_count{verb="POST",resource="pods"} 99
`
	counted, err := parseWrites([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if len(counted) != 2 || counted["POST pods"] != 12 || counted["POST pods/binding"] != 9 {
		t.Errorf("%v", counted)
	}
	more := counted.since(writes{"POST pods": 2, "POST pods/binding": 9})
	if len(more) != 1 || more.total() != 10 || more.perPod(4) != "2.50 POST pods" {
		t.Errorf("%v, %s", more, more.perPod(4))
	}
	if _, err := parseWrites([]byte("apiserver_request_total{verb=\"POST\"\n")); err == nil {
		t.Error("truncated metrics are accepted")
	}
}

func TestUsageIsParsedWithAnyProgramName(t *testing.T) {
	stat := "12 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0"
	used, err := parseUsage(stat, "Name:\ta\nVmHWM:\t  4096 kB\nVmRSS:\t  2048 kB\n")
	if err != nil || used != (usage{CPUSeconds: 2, ResidentMiB: 2, PeakMiB: 4}) {
		t.Errorf("%+v, %v", used, err)
	}
	for _, bad := range [][2]string{{"", "VmRSS: 1 kB"}, {"12 (a) S 1", "VmRSS: 1 kB"}, {stat, "Name: a"}} {
		if _, err := parseUsage(bad[0], bad[1]); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestAReservedPodGetsItsGPU(t *testing.T) {
	a := newAgents(2)
	note := `{"until":9,"nodes":{"node-0001":[{"resource":"nvidia.com/gpu-mps","units":4,"device":"` + deviceOf(1, 5) + `"}]}}`
	a.recordBinding("n/p", "node-0001", note, 4)
	if free := a.nodes[1].freeShares(5); free != 6 || a.unnoted+len(a.elsewhere)+a.refused != 0 {
		t.Errorf("%d free, %+v", free, a)
	}
	// If the reserved GPU is full, the pod receives shares of another GPU, and is counted.
	a.recordBinding("n/q", "node-0001", note, 7)
	if len(a.elsewhere) != 1 || !strings.HasSuffix(a.elsewhere[0], "n/q (7 shares) on node-0001, GPU 5: n/p has 4") || a.nodes[1].freeShares(5) != 6 || a.nodes[1].held["n/q"].gpu == 5 {
		t.Errorf("%q", a.elsewhere)
	}
	a.recordDeletion("n/p", "node-0001")
	a.recordDeletion("n/p", "node-0001")
	if free := a.nodes[1].freeShares(5); free != 10 {
		t.Errorf("%d free after the deletion", free)
	}
	a.recordBinding("n/r", "node-0001", "{", 1)
	a.recordBinding("n/s", "elsewhere", "", 1)
	if len(a.malformed) != 2 {
		t.Errorf("%v", a.malformed)
	}
}

func TestAPodThatFitsNoGPUIsRefused(t *testing.T) {
	a := newAgents(1)
	for gpu := range gpusPerNode {
		a.recordBinding("n/"+string(rune('a'+gpu)), "node-0000", "", 6)
	}
	// 32 shares are free, but only four on each GPU.
	a.recordBinding("n/five", "node-0000", "", 5)
	a.recordBinding("n/four", "node-0000", "", 4)
	if a.refused != 1 || a.unnoted != gpusPerNode+2 {
		t.Errorf("%d refused, %d without a reservation", a.refused, a.unnoted)
	}
}

func TestAStatusReportsAllocations(t *testing.T) {
	m := newMachine(gpusPerNode)
	m.allocate("n/b", 2, 3)
	m.allocate("n/a", 2, 2)
	shared := gpuNodeStatus(spec{Generation: 4, PlanID: "x", Memory: []uint64{10, 20, 30}}, 0, m)
	gpu := shared["gpus"].([]object)[2]
	rows := gpu["allocations"].([]object)
	if len(rows) != 2 || rows[0]["pod"] != "n/a" || rows[1]["memoryMib"] != uint64(30) || rows[1]["ids"].([]string)[0] != deviceOf(0, 2)+"::0" {
		t.Errorf("%v", rows)
	}
	if slice := gpu["slices"].([]object)[0]; slice["inUse"] != 5 || slice["total"] != 10 {
		t.Errorf("%v", slice)
	}
	whole := gpuNodeStatus(spec{}, 0, newMachine(gpusPerNode))
	if gpu := whole["gpus"].([]object)[0]; gpu["mode"] != "Whole" || whole["planId"] != "" {
		t.Errorf("%v", gpu)
	}
}

func TestAPodIsBoundOnce(t *testing.T) {
	a := newAgents(1)
	tracker := newTracker(a)
	now := time.Now()
	tracker.recordRequest("p", 3, now)
	event := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "p"}}
	tracker.recordEvent(watch.Added, event, now)
	event.Spec.NodeName = "node-0000"
	tracker.recordEvent(watch.Modified, event, now.Add(time.Second))
	event.Status.Phase = corev1.PodRunning
	tracker.recordEvent(watch.Modified, event, now.Add(2*time.Second))
	if l := tracker.latencies([]string{"p"}); l.Bound != 1 || l.P50 != 1000 {
		t.Errorf("%+v", l)
	}
	if a.unnoted != 1 || tracker.countPods([]string{"p"}, func(r *record) bool { return r.running }) != 1 {
		t.Error("the pod was bound again, or does not run")
	}
	tracker.recordEvent(watch.Deleted, event, now)
	tracker.recordEvent(watch.Deleted, event, now)
	if a.nodes[0].held["namespace/p"].ids != nil || len(a.nodes[0].held) != 0 {
		t.Error("the pod still has an allocation")
	}
}

func TestTableComparesSystemsOnEqualNodes(t *testing.T) {
	speeds := []result{
		{System: "extended", Nodes: 5, Burst: latencies{PodsPerSecond: 100}}, {System: "dra", Nodes: 5, Burst: latencies{PodsPerSecond: 40}},
		{System: "cleave", Nodes: 5, Burst: latencies{PodsPerSecond: 90}}, {System: "cleave", Nodes: 9, Burst: latencies{PodsPerSecond: 10}},
		// The table uses the median of the rounds.
		{System: "cleave", Nodes: 5, Burst: latencies{PodsPerSecond: 80}}, {System: "cleave", Nodes: 5, Burst: latencies{PodsPerSecond: 300}},
	}
	lines := strings.Split(table(speeds), "\n")
	row := func(i int) []string { return strings.Fields(lines[i]) }
	if got := row(3); !slices.Contains(got, "90.0") || !slices.Contains(got, "0.90") || !slices.Contains(got, "2.25") {
		t.Errorf("%v", got)
	}
	if got := row(4); !slices.Contains(got, "-") {
		t.Errorf("%v", got)
	}
}

func TestInvalidArgumentsAreRejected(t *testing.T) {
	if _, err := parse(nil); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"-nodes=0", "-nodes=1", "-pods=x,y", "-systems=other", "-clients=0", "-rate=0", "-paced=-1", "-rounds=0"} {
		if _, err := parse([]string{bad}); err == nil {
			t.Errorf("%s is accepted", bad)
		}
	}
}

func TestSchedulerKeepsItsDefaults(t *testing.T) {
	if stock := (tuning{}).connection("k"); len(stock) != 2 || stock["kubeconfig"] != "k" {
		t.Errorf("the scheduler's connection changes defaults: %v", stock)
	}
	if flags := (tuning{}).flags(); len(flags) != 0 {
		t.Errorf("the controller manager gets %q", flags)
	}
	if raised := (tuning{qps: 7}).connection("k"); raised["qps"] != 7 || raised["burst"] != 7 {
		t.Errorf("not raised: %v", raised)
	}
}
