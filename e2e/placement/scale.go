package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// scaleResult contains the results of one system in a large cluster.
type scaleResult struct {
	System  string    `json:"system"`
	Nodes   int       `json:"nodes"`
	Pods    int       `json:"pods"`   // that run
	Shares  int       `json:"shares"` // of the pods, those with one share
	FillSec float64   `json:"fillSeconds"`
	Paced   latencies `json:"paced"` // pods that arrive in the full cluster

	ResidentMiB float64 `json:"residentMiB"` // the operator after the pods were created
	PeakMiB     float64 `json:"peakMiB"`
	LookP50     float64 `json:"lookP50Ms"` // decisions while the paced pods arrived
	LookP99     float64 `json:"lookP99Ms"`
	Looks       float64 `json:"looks"`
	PacedKiB    float64 `json:"kibPerPacedPod"` // received from the API server

	RestartSec     float64 `json:"restartSeconds"`    // from the start until all objects are listed
	RestartPodSec  float64 `json:"restartPodSeconds"` // from the start until a new pod is bound
	RestartMiB     float64 `json:"restartMiB"`
	RestartPeakMiB float64 `json:"restartPeakMiB"`
	ListBytes      float64 `json:"listBytesPerPod"` // received until all objects are listed
	FailOverSec    float64 `json:"failOverSeconds"` // from the leader's death until a new pod is bound
}

// large contains the options of a run in a large cluster.
type large struct {
	options options
	nodes   int
	pods    int
	paced   int
	limit   time.Duration
}

// scale measures the operator in a large cluster that is full of running pods, and compares it with
// a plain extended resource.
func scale(ctx context.Context, arguments []string) error {
	l := &large{}
	o := &l.options
	var names string
	flags := flag.NewFlagSet("placement scale", flag.ContinueOnError)
	o.addFlags(flags)
	flags.StringVar(&o.out, "out", "", "file for the results, one line of JSON each; empty for none")
	flags.IntVar(&l.nodes, "nodes", 1000, "number of nodes with 8 GPUs")
	flags.IntVar(&l.pods, "pods", 80000, "number of pods, including those of -paced; each has one of a node's 80 shares, or none if there are more pods than shares")
	flags.IntVar(&l.paced, "paced", 200, "number of pods that arrive when the cluster is full; this many shares are left free for them")
	flags.Float64Var(&o.rate, "rate", 10, "rate of these pods, in pods per second")
	flags.StringVar(&names, "systems", "extended,cleave", "systems to measure, in this order")
	flags.IntVar(&o.clients, "clients", 32, "number of concurrent clients that create pods")
	flags.IntVar(&o.qps, "qps", 0, "maximum requests per second of the scheduler and the controller manager; 0 for their defaults, 50 and 20")
	flags.DurationVar(&l.limit, "limit", 30*time.Minute, "maximum time of each step")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if l.nodes < 1 || l.paced < 1 || l.pods <= l.paced || o.rate <= 0 || o.clients < 1 || o.qps < 0 {
		return errors.New("-nodes, -paced and -clients must be at least 1, -pods greater than -paced, -rate above 0, -qps at least 0")
	}
	o.stall, o.limit = time.Minute, l.limit
	dir, remove, err := workDir()
	if err != nil {
		return err
	}
	defer remove()
	output, err := createResults(o.out)
	if err != nil {
		return err
	}
	defer output.Close()
	var results []scaleResult
	for _, name := range strings.Split(names, ",") {
		known := systems()
		index := slices.IndexFunc(known, func(s system) bool { return s.name == name && s.check == nil })
		if index < 0 {
			return fmt.Errorf("-systems: %q cannot be measured here", name)
		}
		r, err := l.run(ctx, filepath.Join(dir, name), known[index])
		if err != nil {
			return fmt.Errorf("%s on %d nodes: %w", name, l.nodes, err)
		}
		results = append(results, r)
		if err := json.NewEncoder(output).Encode(r); err != nil {
			return err
		}
	}
	fmt.Print(scaleTable(results))
	return nil
}

// run starts the control plane, measures one system, and stops all processes.
func (l *large) run(ctx context.Context, dir string, s system) (r scaleResult, err error) {
	t := &trial{options: l.options, system: s, nodes: l.nodes, limit: l.limit}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	logs := filepath.Join(l.options.logs, fmt.Sprintf("scale-%s-%d", s.name, l.nodes))
	t.plane, ctx, err = startPlane(ctx, l.options.programs, dir, logs, tuning{qps: l.options.qps})
	if err != nil {
		return r, err
	}
	defer t.plane.stop()
	// An error that ended the context is the cause of all other errors.
	defer func() {
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
	}()
	if err := t.createNamespace(ctx, namespace, nil); err != nil {
		return r, err
	}
	if err := makeNodes(ctx, t); err != nil {
		return r, err
	}
	t.agents = newAgents(t.nodes)
	shares := s.name == "cleave"
	var first *replica
	if shares {
		if err := installCleave(ctx, t); err != nil {
			return r, err
		}
		if err := makeAgents(ctx, t); err != nil {
			return r, err
		}
		if first, err = startReplica(ctx, t, "operator-0"); err != nil {
			return r, err
		}
		if err := simulateAgentStart(ctx, t); err != nil {
			return r, err
		}
	}
	r = scaleResult{System: s.name, Nodes: l.nodes}
	began := time.Now()
	if r.Pods, r.Shares, err = l.fill(ctx, t); err != nil {
		return r, err
	}
	r.FillSec = time.Since(began).Seconds()
	progress(s.name, "%d pods run", r.Pods)
	t.tracker = newTracker(t.agents)
	if err := t.tracker.follow(ctx, t.plane); err != nil {
		return r, err
	}
	if err := l.measurePaced(ctx, t, first, &r); err != nil {
		return r, err
	}
	progress(s.name, "%d pods arrived", r.Paced.Bound)
	if shares {
		return r, l.measureReplicas(ctx, t, first, &r)
	}
	return r, nil
}

func progress(system, format string, arguments ...any) {
	fmt.Fprintf(os.Stderr, "%s %s: %s\n", time.Now().Format(time.TimeOnly), system, fmt.Sprintf(format, arguments...))
}

func (t *trial) createNamespace(ctx context.Context, name string, labels map[string]string) error {
	_, err := t.plane.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
	return err
}

// podsPerNamespace is the number of running pods in one namespace.
const podsPerNamespace = 5000

// podsPerController is the number of running pods of one ReplicaSet.
const podsPerController = 50

// fill creates running pods, evenly on all nodes, and writes the statuses that agents would write.
// It leaves shares free for the paced pods and for two further pods.
func (l *large) fill(ctx context.Context, t *trial) (pods, shares int, err error) {
	pods = l.pods - l.paced
	total := l.nodes * gpusPerNode * sharesPerGPU
	shares = min(pods, total-l.paced-2)
	if shares < 1 {
		return 0, 0, fmt.Errorf("%d nodes have too few shares for %d paced pods", l.nodes, l.paced)
	}
	for index := range (pods + podsPerNamespace - 1) / podsPerNamespace {
		// Allow pods that name their node, because the running pods are created with a node.
		allowed := map[string]string{cleaveGroup + "/allow": "node-name.annotations"}
		if err := t.createNamespace(ctx, fillNamespace(index), allowed); err != nil {
			return 0, 0, err
		}
	}
	err = forEach(ctx, pods, l.options.clients, func(ctx context.Context, index int) error {
		one := l.runningPod(t, index, index < shares)
		_, err := t.plane.client.CoreV1().Pods(one.Namespace).Create(ctx, one, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return 0, 0, fmt.Errorf("create the running pods: %w", err)
	}
	if t.agents.statuses != nil {
		if err := forEach(ctx, l.nodes, atOnce, t.agents.statuses.write); err != nil {
			return 0, 0, err
		}
	}
	return pods, shares, waitUntil(ctx, l.limit, "kwok to run all pods", func(ctx context.Context) (bool, error) {
		time.Sleep(time.Second)
		found, err := t.plane.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "status.phase=Pending", Limit: 1})
		return err == nil && len(found.Items) == 0, err
	})
}

func fillNamespace(index int) string { return fmt.Sprintf("team-%d", index) }

// runningPod returns a pod of a ReplicaSet that is bound to a node. If share is true, the pod has
// one share.
func (l *large) runningPod(t *trial, index int, share bool) *corev1.Pod {
	app := fmt.Sprintf("app-%d", index/podsPerController)
	node := index % l.nodes
	one := pod(fmt.Sprintf("%s-7c9f8d6b5d-%05x", app, index))
	one.Namespace = fillNamespace(index / podsPerNamespace)
	one.Labels = map[string]string{
		"app.kubernetes.io/name": app, "app.kubernetes.io/instance": "production", "app.kubernetes.io/component": "server",
		"app.kubernetes.io/part-of": "shop", "pod-template-hash": "7c9f8d6b5d", "team": one.Namespace,
	}
	controls := true
	one.OwnerReferences = []metav1.OwnerReference{{
		APIVersion: "apps/v1", Kind: "ReplicaSet", Name: app + "-7c9f8d6b5d", Controller: &controls,
		UID: types.UID(fmt.Sprintf("1a2b3c4d-0000-4000-8000-%012x", index/podsPerController)),
	}}
	one.Spec.NodeName = nodeName(node)
	one.Spec.Containers[0].Resources.Requests = corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("250m"), corev1.ResourceMemory: resource.MustParse("512Mi"),
	}
	if !share {
		return one
	}
	one.Spec.Containers[0].Resources.Limits = corev1.ResourceList{t.system.resource: *resource.NewQuantity(1, resource.DecimalSI)}
	if t.agents.statuses != nil {
		t.agents.mutex.Lock()
		defer t.agents.mutex.Unlock()
		m := &t.agents.nodes[node]
		gpu := m.fullestGPU(1)
		m.allocate(one.Namespace+"/"+one.Name, gpu, 1)
		one.Annotations = map[string]string{placementAnnotation: fmt.Sprintf(
			`{"until":%d,"nodes":{%q:[{"resource":%q,"units":1,"device":%q}]}}`,
			time.Now().Unix()+300, nodeName(node), cleaveResource, deviceOf(node, gpu))}
	}
	return one
}

// measurePaced creates pods at a fixed rate, and reads the durations of the operator's decisions
// about them.
func (l *large) measurePaced(ctx context.Context, t *trial, operator *replica, r *scaleResult) error {
	ones := make([]int, l.paced)
	for i := range ones {
		ones[i] = 1
	}
	var before histogram
	var received int64
	if operator != nil {
		var err error
		if before, err = operator.decisions(ctx); err != nil {
			return err
		}
		used, err := operator.process.usage()
		if err != nil {
			return err
		}
		r.ResidentMiB, r.PeakMiB, received = used.ResidentMiB, used.PeakMiB, operator.proxy.received.Load()
	}
	paced, err := t.create(ctx, "paced", ones, l.options.clients, l.options.rate)
	if err != nil {
		return err
	}
	if err := t.waitUntilQuiet(ctx, paced); err != nil {
		return err
	}
	r.Paced = t.tracker.latencies(paced)
	if operator == nil {
		return nil
	}
	after, err := operator.decisions(ctx)
	if err != nil {
		return err
	}
	during := after.since(before)
	r.Looks, r.LookP50, r.LookP99 = during.count(), during.percentile(50)*1000, during.percentile(99)*1000
	r.PacedKiB = float64(operator.proxy.received.Load()-received) / 1024 / float64(max(r.Paced.Bound, 1))
	return nil
}

// measureReplicas measures a restart of the operator, and the failover to a standby replica after
// the leader is killed.
func (l *large) measureReplicas(ctx context.Context, t *trial, first *replica, r *scaleResult) error {
	first.process.stop()
	began := time.Now()
	first, err := startReplica(ctx, t, "operator-0")
	if err != nil {
		return err
	}
	r.RestartSec = time.Since(began).Seconds()
	r.ListBytes = float64(first.proxy.received.Load()) / float64(r.Pods)
	if r.RestartPodSec, err = l.bindOne(ctx, t, "restart", began); err != nil {
		return err
	}
	used, err := first.process.usage()
	if err != nil {
		return err
	}
	r.RestartMiB, r.RestartPeakMiB = used.ResidentMiB, used.PeakMiB
	progress(t.system.name, "restarted in %.1f s", r.RestartSec)
	if _, err := startReplica(ctx, t, "operator-1"); err != nil {
		return err
	}
	began = time.Now()
	first.process.kill()
	r.FailOverSec, err = l.bindOne(ctx, t, "failover", began)
	progress(t.system.name, "failed over in %.1f s", r.FailOverSec)
	return err
}

// bindOne creates a pod, and returns the time from began until the pod is bound.
func (l *large) bindOne(ctx context.Context, t *trial, prefix string, began time.Time) (float64, error) {
	pods, err := t.create(ctx, prefix, []int{1}, 1, 0)
	if err != nil {
		return 0, err
	}
	if err := waitUntil(ctx, l.limit, "a pod to be bound", func(context.Context) (bool, error) {
		return t.tracker.countPods(pods, func(r *record) bool { return r.node != "" }) == len(pods), nil
	}); err != nil {
		return 0, err
	}
	t.tracker.mutex.Lock()
	defer t.tracker.mutex.Unlock()
	return t.tracker.pods[pods[0]].bound.Sub(began).Seconds(), nil
}

// replica is a running operator. It connects to the API server through a proxy, which counts the
// bytes that the operator receives.
type replica struct {
	process *process
	proxy   *proxy
	address string
}

// startReplica creates the operator's own pod, starts the operator, and waits until the operator
// has listed all objects.
func startReplica(ctx context.Context, t *trial, name string) (*replica, error) {
	own := pod(name)
	own.Namespace, own.Spec.NodeName = cleaveNamespace, nodeName(0)
	// When the operator restarts, the pod already exists.
	_, err := t.plane.client.CoreV1().Pods(cleaveNamespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		if _, err := t.plane.client.CoreV1().Pods(cleaveNamespace).Create(ctx, own, metav1.CreateOptions{}); err != nil {
			return nil, fmt.Errorf("create the operator's pod: %w", err)
		}
	}
	server, err := url.Parse(t.plane.url)
	if err != nil {
		return nil, err
	}
	counting, err := newProxy(ctx, server.Host)
	if err != nil {
		return nil, err
	}
	config, err := os.ReadFile(t.plane.kubeconfig(userOperator))
	if err != nil {
		return nil, err
	}
	kubeconfig := t.plane.path(name + ".kubeconfig")
	if err := os.WriteFile(kubeconfig, bytes.ReplaceAll(config, []byte(server.Host), []byte(counting.address)), 0o600); err != nil {
		return nil, err
	}
	started, address, err := startOperatorAs(ctx, t, name, kubeconfig)
	return &replica{process: started, proxy: counting, address: address}, err
}

// decisions reads the histogram of the operator's decisions about gated pods.
func (r *replica) decisions(ctx context.Context) (histogram, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+r.address+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, fmt.Errorf("metrics of the operator: %w", err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("metrics of the operator: %w", err)
	}
	return parseHistogram(text, "cleave_operator_placement_seconds")
}

// bucket is the number of values that do not exceed a bound.
type bucket struct{ bound, count float64 }

// histogram contains cumulative buckets, in the order of their bounds. The last bound is infinite.
type histogram []bucket

func parseHistogram(text []byte, family string) (histogram, error) {
	var h histogram
	prefix := family + `_bucket{le="`
	for line := range strings.Lines(string(text)) {
		rest, found := strings.CutPrefix(strings.TrimSpace(line), prefix)
		if !found {
			continue
		}
		bound, count, found := strings.Cut(rest, `"} `)
		if !found {
			return nil, fmt.Errorf("malformed line of %s: %q", family, line)
		}
		le, err := strconv.ParseFloat(bound, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", family, err)
		}
		value, err := strconv.ParseFloat(count, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", family, err)
		}
		h = append(h, bucket{le, value})
	}
	if len(h) == 0 {
		return nil, fmt.Errorf("the operator has no metric %s", family)
	}
	return h, nil
}

func (h histogram) since(earlier histogram) histogram {
	more := slices.Clone(h)
	for i := range more {
		if i < len(earlier) {
			more[i].count -= earlier[i].count
		}
	}
	return more
}

func (h histogram) count() float64 {
	if len(h) == 0 {
		return 0
	}
	return h[len(h)-1].count
}

// percentile returns the bound of the bucket that contains the percentile. The bound is an upper
// limit of the true value.
func (h histogram) percentile(p float64) float64 {
	for _, b := range h {
		if b.count >= h.count()*p/100 {
			return b.bound
		}
	}
	return math.NaN()
}

// proxy forwards connections to the API server, and counts the bytes without decrypting them.
type proxy struct {
	address  string
	received atomic.Int64 // from the API server
}

func newProxy(ctx context.Context, server string) (*proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &proxy{address: listener.Addr().String()}
	context.AfterFunc(ctx, func() { listener.Close() })
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go p.forward(client, server)
		}
	}()
	return p, nil
}

func (p *proxy) forward(client net.Conn, server string) {
	defer client.Close()
	upstream, err := net.Dial("tcp", server)
	if err != nil {
		return
	}
	defer upstream.Close()
	go func() {
		_, _ = io.Copy(upstream, client)
		upstream.Close()
	}()
	_, _ = io.Copy(client, io.TeeReader(upstream, counter{&p.received}))
}

// counter is a writer that counts the bytes it receives.
type counter struct{ total *atomic.Int64 }

func (c counter) Write(bytes []byte) (int, error) {
	c.total.Add(int64(len(bytes)))
	return len(bytes), nil
}

// kill kills the process with SIGKILL, so that the process cannot release its lease.
func (p *process) kill() {
	p.stopping.Store(true)
	_ = p.command.Process.Signal(syscall.SIGKILL)
	<-p.done
}

func scaleTable(results []scaleResult) string {
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "nodes\tpods\tsystem\tarrived\tp50 ms\tp99 ms\toperator MiB\tpeak\tlook p50 ms\tp99\tKiB/pod\trestart s\tpod bound s\tMiB\tpeak\tlisted B/pod\tfail-over s\t")
	for _, r := range results {
		fmt.Fprintf(w, "%d\t%d\t%s\t%d/%d\t%.0f\t%.0f\t", r.Nodes, r.Pods, r.System, r.Paced.Bound, r.Paced.Pods, r.Paced.P50, r.Paced.P99)
		if r.Looks == 0 {
			fmt.Fprintln(w, strings.Repeat("-\t", 11))
			continue
		}
		fmt.Fprintf(w, "%.0f\t%.0f\t≤ %.1f\t≤ %.1f\t%.1f\t%.1f\t%.1f\t%.0f\t%.0f\t%.0f\t%.1f\t\n",
			r.ResidentMiB, r.PeakMiB, r.LookP50, r.LookP99, r.PacedKiB,
			r.RestartSec, r.RestartPodSec, r.RestartMiB, r.RestartPeakMiB, r.ListBytes, r.FailOverSec)
	}
	w.Flush()
	return out.String()
}
