package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	toolswatch "k8s.io/client-go/tools/watch"
)

// randomShareCounts returns a random number of shares for each pod, from 1 to 10. The numbers
// depend only on the seed.
func randomShareCounts(seed uint64, count int) []int {
	random := rand.New(rand.NewPCG(seed, 0))
	drawn := make([]int, count)
	for i := range drawn {
		drawn[i] = 1 + random.IntN(sharesPerGPU)
	}
	return drawn
}

// record contains the times of one pod, measured by this process's clock.
type record struct {
	shares  int
	sent    time.Time // just before the request that creates it
	bound   time.Time // the time at which the watch reported a node
	node    string
	running bool
	failed  bool
	gone    bool
}

// tracker records the times of pods from watch events.
type tracker struct {
	agents *agents

	mutex    sync.Mutex
	pods     map[string]*record
	progress time.Time // the time of the latest binding
}

func newTracker(a *agents) *tracker { return &tracker{agents: a, pods: make(map[string]*record)} }

// follow watches the pods and records their times until the context ends.
func (t *tracker) follow(ctx context.Context, p *plane) error {
	pods := p.client.CoreV1().Pods(namespace)
	list, err := pods.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	watcher, err := toolswatch.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			return pods.Watch(ctx, options)
		},
	})
	if err != nil {
		return err
	}
	go func() {
		for event := range watcher.ResultChan() {
			if pod, ok := event.Object.(*corev1.Pod); ok {
				t.recordEvent(event.Type, pod, time.Now())
			} else if event.Type == watch.Error {
				p.failed(fmt.Errorf("the watch of pods failed: %v", event.Object))
			}
		}
		p.failed(fmt.Errorf("the watch of pods ended"))
	}()
	return nil
}

func (t *tracker) recordRequest(pod string, shares int, now time.Time) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.pods[pod] = &record{shares: shares, sent: now}
}

// recordEvent updates the records from one watch event.
func (t *tracker) recordEvent(kind watch.EventType, pod *corev1.Pod, now time.Time) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	known, ok := t.pods[pod.Name]
	if !ok {
		return
	}
	name := pod.Namespace + "/" + pod.Name
	if pod.Spec.NodeName != "" && known.node == "" {
		known.bound, known.node, t.progress = now, pod.Spec.NodeName, now
		t.agents.recordBinding(name, known.node, pod.Annotations[placementAnnotation], known.shares)
	}
	known.running = known.running || pod.Status.Phase == corev1.PodRunning
	known.failed = known.failed || pod.Status.Phase == corev1.PodFailed
	if kind == watch.Deleted && !known.gone {
		known.gone = true
		t.agents.recordDeletion(name, known.node)
	}
}

// countPods returns the number of these pods that satisfy a condition.
func (t *tracker) countPods(pods []string, is func(*record) bool) int {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	count := 0
	for _, pod := range pods {
		if known, ok := t.pods[pod]; ok && is(known) {
			count++
		}
	}
	return count
}

// waitUntilSettled waits until all pods are bound. It stops waiting if no pod is bound for the
// duration stall, or if limit has passed since the first request. It then waits until the bound
// pods are running.
func (t *tracker) waitUntilSettled(ctx context.Context, pods []string, stall, limit time.Duration) error {
	isBound := func(r *record) bool { return r.node != "" }
	started, began := time.Now(), t.firstRequestTime(pods)
	err := waitUntil(ctx, 2*limit, "the pods to be bound", func(context.Context) (bool, error) {
		t.mutex.Lock()
		last := t.progress
		t.mutex.Unlock()
		if last.Before(started) {
			last = started
		}
		return t.countPods(pods, isBound) == len(pods) || time.Since(last) > stall || time.Since(began) > limit, nil
	})
	if err != nil {
		return err
	}
	return waitUntil(ctx, 2*time.Minute, "the bound pods to run", func(context.Context) (bool, error) {
		return t.countPods(pods, func(r *record) bool { return isBound(r) && !r.running }) == 0, nil
	})
}

// latencies contains the measured latencies of a group of pods.
type latencies struct {
	Pods          int     `json:"pods"`
	Bound         int     `json:"bound"`
	Seconds       float64 `json:"seconds"` // from the first create to the last bound pod
	PodsPerSecond float64 `json:"podsPerSecond"`
	P50           float64 `json:"p50Ms"` // from create to bound
	P99           float64 `json:"p99Ms"`
	Max           float64 `json:"maxMs"`
}

func (t *tracker) latencies(pods []string) latencies {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	records := make([]record, 0, len(pods))
	for _, pod := range pods {
		if known, ok := t.pods[pod]; ok {
			records = append(records, *known)
		}
	}
	return summarize(records)
}

// summarize computes the latencies of the bound pods, and counts the other pods.
func summarize(records []record) latencies {
	l := latencies{Pods: len(records)}
	var first, last time.Time
	var times []float64
	for _, r := range records {
		if first.IsZero() || r.sent.Before(first) {
			first = r.sent
		}
		if r.node == "" {
			continue
		}
		l.Bound++
		if r.bound.After(last) {
			last = r.bound
		}
		times = append(times, r.bound.Sub(r.sent).Seconds()*1000)
	}
	if l.Bound == 0 {
		return l
	}
	slices.Sort(times)
	l.Seconds = last.Sub(first).Seconds()
	if l.Seconds > 0 {
		l.PodsPerSecond = float64(l.Bound) / l.Seconds
	}
	l.P50, l.P99, l.Max = percentile(times, 50), percentile(times, 99), times[len(times)-1]
	return l
}

// percentile returns the smallest of the sorted values that is at least as large as p percent of
// the values.
func percentile(sorted []float64, p int) float64 {
	rank := (len(sorted)*p + 99) / 100
	return sorted[max(rank, 1)-1]
}

// create creates pods with concurrent clients, at full speed or at a rate per second. It returns
// the names of the pods that were created before the time limit.
func (t *trial) create(ctx context.Context, prefix string, shares []int, clients int, rate float64) ([]string, error) {
	names := make([]string, len(shares))
	for i := range names {
		names[i] = fmt.Sprintf("%s-%05d", prefix, i)
	}
	start := time.Now()
	err := forEach(ctx, len(shares), clients, func(ctx context.Context, index int) error {
		if time.Since(start) > t.options.limit {
			return nil
		}
		if rate > 0 {
			due := start.Add(time.Duration(float64(index) / rate * float64(time.Second)))
			select {
			case <-time.After(time.Until(due)):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		one := pod(names[index])
		t.system.request(one, shares[index])
		t.tracker.recordRequest(one.Name, shares[index], time.Now())
		_, err := t.plane.client.CoreV1().Pods(namespace).Create(ctx, one, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("create the pods: %w", err)
	}
	return slices.DeleteFunc(names, func(name string) bool {
		return t.tracker.countPods([]string{name}, func(*record) bool { return true }) == 0
	}), nil
}

// remove deletes pods and waits until they no longer exist.
func (t *trial) remove(ctx context.Context, pods []string) error {
	now := int64(0)
	err := forEach(ctx, len(pods), atOnce, func(ctx context.Context, index int) error {
		return t.plane.client.CoreV1().Pods(namespace).Delete(ctx, pods[index], metav1.DeleteOptions{GracePeriodSeconds: &now})
	})
	if err != nil {
		return fmt.Errorf("delete the pods: %w", err)
	}
	return waitUntil(ctx, time.Minute, "the API server to remove the deleted pods", func(context.Context) (bool, error) {
		return t.tracker.countPods(pods, func(r *record) bool { return r.gone }) == len(pods), nil
	})
}

// writes contains the API server's counts of write requests, by verb and resource.
type writes map[string]float64

// countWrites reads the counts from the API server's metrics. It omits writes of nodes and leases,
// because most of them are heartbeats, which depend on time and not on pods.
func countWrites(ctx context.Context, p *plane) (writes, error) {
	text, err := p.custom.Get().AbsPath("/metrics").SetHeader("Accept", "text/plain").Do(ctx).Raw()
	if err != nil {
		return nil, fmt.Errorf("metrics of the API server: %w", err)
	}
	return parseWrites(text)
}

func parseWrites(text []byte) (writes, error) {
	const family = "apiserver_request_total"
	// Parse only this metric family, because the other families are long.
	var lines bytes.Buffer
	fmt.Fprintf(&lines, "# TYPE %s counter\n", family)
	for line := range bytes.Lines(text) {
		if bytes.HasPrefix(line, []byte(family+"{")) {
			lines.Write(line)
		}
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(&lines)
	if err != nil {
		return nil, fmt.Errorf("metrics of the API server: %w", err)
	}
	counted := make(writes)
	for _, metric := range families[family].GetMetric() {
		label := func(name string) string {
			index := slices.IndexFunc(metric.Label, func(pair *dto.LabelPair) bool { return pair.GetName() == name })
			if index < 0 {
				return ""
			}
			return metric.Label[index].GetValue()
		}
		verb, resource := label("verb"), label("resource")
		if !slices.Contains([]string{"POST", "PUT", "PATCH", "APPLY", "DELETE"}, verb) || resource == "leases" || resource == "nodes" {
			continue
		}
		// Omit reviews, such as SubjectAccessReviews, because they are queries and not writes.
		if strings.HasSuffix(resource, "reviews") {
			continue
		}
		if sub := label("subresource"); sub != "" {
			resource += "/" + sub
		}
		counted[verb+" "+resource] += metric.Counter.GetValue()
	}
	return counted, nil
}

// since returns the counts of the writes since an earlier count.
func (w writes) since(earlier writes) writes {
	more := make(writes)
	for what, count := range w {
		if delta := count - earlier[what]; delta > 0 {
			more[what] = delta
		}
	}
	return more
}

func (w writes) total() float64 {
	total := 0.0
	for _, count := range w {
		total += count
	}
	return total
}

// firstRequestTime returns the time of the first request that created one of these pods.
func (t *tracker) firstRequestTime(pods []string) time.Time {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	var first time.Time
	for _, pod := range pods {
		if known := t.pods[pod]; known != nil && (first.IsZero() || known.sent.Before(first)) {
			first = known.sent
		}
	}
	return first
}
