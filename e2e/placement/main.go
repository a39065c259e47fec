// Command placement measures how fast pods that ask for shares of GPUs are bound,
// and at what cost: with a plain extended resource, with DRA and consumable
// capacity, and with Cleave. Each runs on a control plane of its own, with kwok in
// place of kubelets.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// options are the command line's.
type options struct {
	programs programs
	chart    string
	logs     string
	out      string
	nodes    []int
	pods     []int
	systems  []string
	paced    int
	rate     float64
	clients  int
	rounds   int
	seed     uint64
	qps      int
	stall    time.Duration
	limit    time.Duration
}

func parse(arguments []string) (options, error) {
	var o options
	var nodes, pods, names string
	flags := flag.NewFlagSet("placement", flag.ContinueOnError)
	flags.StringVar(&o.programs.kube, "kube", "", "folder with kube-apiserver, etcd and so on")
	flags.StringVar(&o.programs.helm, "helm", "", "helm")
	flags.StringVar(&o.programs.kwok, "kwok", "", "kwok")
	flags.StringVar(&o.programs.operator, "operator", "", "the program cleave")
	flags.StringVar(&o.chart, "chart", "charts/cleave", "the chart")
	flags.StringVar(&o.logs, "logs", "", "folder for the components' logs")
	flags.StringVar(&o.out, "out", "", "file for the results, a line of JSON each; none when empty")
	flags.StringVar(&nodes, "nodes", "200,1000", "how many nodes; several with commas")
	flags.StringVar(&pods, "pods", "2000,4000", "how many pods at full speed, for each number of nodes")
	flags.StringVar(&names, "systems", "extended,dra,cleave", "which, in this order")
	flags.IntVar(&o.paced, "paced", 100, "how many pods at a rate, before")
	flags.Float64Var(&o.rate, "rate", 20, "that rate, pods a second")
	flags.IntVar(&o.clients, "clients", 16, "how many clients create pods at once")
	flags.IntVar(&o.rounds, "rounds", 1, "how often all of it is done; the table shows medians")
	flags.Uint64Var(&o.seed, "seed", 42, "of the pods' sizes")
	flags.IntVar(&o.qps, "qps", 0, "requests a second that the scheduler and the controller manager may send; their own defaults, 50 and 20, when 0")
	flags.DurationVar(&o.stall, "stall", 30*time.Second, "how long no pod is bound until the others count as not bound")
	flags.DurationVar(&o.limit, "limit", time.Minute, "how long pods are created and waited for at most; those not bound by then are counted")
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	var err error
	if o.nodes, err = numbers(nodes); err != nil {
		return o, fmt.Errorf("-nodes: %w", err)
	}
	if o.pods, err = numbers(pods); err != nil {
		return o, fmt.Errorf("-pods: %w", err)
	}
	if len(o.nodes) != len(o.pods) {
		return o, fmt.Errorf("-nodes has %d numbers, -pods %d", len(o.nodes), len(o.pods))
	}
	known := systems()
	o.systems = strings.Split(names, ",")
	for _, name := range o.systems {
		if !slices.ContainsFunc(known, func(s system) bool { return s.name == name }) {
			return o, fmt.Errorf("-systems: there is no %q", name)
		}
	}
	if o.clients < 1 || o.rounds < 1 || o.paced < 0 || o.qps < 0 || o.rate <= 0 {
		return o, errors.New("-clients and -rounds are at least 1, -rate is above 0, -paced and -qps not below")
	}
	return o, nil
}

func numbers(text string) ([]int, error) {
	var all []int
	for _, part := range strings.Split(text, ",") {
		number, err := strconv.Atoi(part)
		if err != nil || number < 1 {
			return nil, fmt.Errorf("%q is not a number above 0", part)
		}
		all = append(all, number)
	}
	return all, nil
}

// trial is one system on one number of nodes.
type trial struct {
	options  options
	system   system
	nodes    int
	plane    *plane
	operator *process
	agents   *agents
	tracker  *tracker
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// What goes wrong in the client libraries comes back as an error too.
	klog.SetLogger(logr.Discard())
	o, err := parse(os.Args[1:])
	if err == nil {
		err = run(ctx, o)
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "placement:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	dir, remove, err := workDir()
	if err != nil {
		return err
	}
	defer remove()
	output := io.Discard
	if o.out != "" {
		file, err := os.Create(o.out)
		if err != nil {
			return err
		}
		defer file.Close()
		output = file
	}
	encoder := json.NewEncoder(output)
	var results []result
	for round := range o.rounds {
		for i, nodes := range o.nodes {
			for _, name := range o.systems {
				known := systems()
				s := known[slices.IndexFunc(known, func(s system) bool { return s.name == name })]
				t := &trial{options: o, system: s, nodes: nodes}
				began := time.Now()
				r, err := t.run(ctx, filepath.Join(dir, fmt.Sprintf("%s-%d-%d", name, nodes, round)), o.pods[i])
				if err != nil {
					return fmt.Errorf("%s on %d nodes: %w", name, nodes, err)
				}
				r.Round = round
				results = append(results, r)
				fmt.Fprintf(os.Stderr, "%s on %d nodes: %d of %d pods bound, %.0f a second (%s in all)\n",
					name, nodes, r.Burst.Bound, r.Burst.Pods, r.Burst.PodsPerSecond, time.Since(began).Round(time.Second))
				if err := encoder.Encode(r); err != nil {
					return err
				}
			}
		}
	}
	fmt.Print(table(results))
	return nil
}

// run starts everything, creates the pods, and ends everything.
func (t *trial) run(ctx context.Context, dir string, pods int) (r result, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	logs := filepath.Join(t.options.logs, fmt.Sprintf("%s-%d", t.system.name, t.nodes))
	t.plane, ctx, err = startPlane(ctx, t.options.programs, dir, logs, tuning{qps: t.options.qps})
	if err != nil {
		return r, err
	}
	defer t.plane.stop()
	// What went wrong is what ended the context, if something did.
	defer func() {
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
	}()
	_, err = t.plane.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	if err != nil {
		return r, err
	}
	if err := makeNodes(ctx, t); err != nil {
		return r, err
	}
	t.agents = newAgents(t.nodes)
	if t.system.prepare != nil {
		if err := t.system.prepare(ctx, t); err != nil {
			return r, err
		}
	}
	t.tracker = newTracker(t.agents)
	if err := t.tracker.follow(ctx, t.plane); err != nil {
		return r, err
	}
	return t.measure(ctx, pods)
}

// measure creates pods: some for warming up, which are deleted again; then some at a
// rate, which tells how long one takes that waits for no other; then all others at once.
func (t *trial) measure(ctx context.Context, pods int) (result, error) {
	o := t.options
	r := result{System: t.system.name, Nodes: t.nodes}
	const warming = 20
	drawn := sizes(o.seed, warming+o.paced+pods)
	warm, err := t.create(ctx, "warm", drawn[:warming], o.clients, 0)
	if err != nil {
		return r, err
	}
	if err := t.tracker.settle(ctx, warm, o.stall, o.limit); err != nil {
		return r, err
	}
	if bound := t.tracker.count(warm, func(r *record) bool { return r.node != "" }); bound < warming {
		return r, fmt.Errorf("of the first %d pods %d were bound: this does not work", warming, bound)
	}
	if err := t.remove(ctx, warm); err != nil {
		return r, err
	}
	if o.paced > 0 {
		paced, err := t.create(ctx, "paced", drawn[warming:warming+o.paced], o.clients, o.rate)
		if err != nil {
			return r, err
		}
		if err := t.quiet(ctx, paced); err != nil {
			return r, err
		}
		r.Rate = o.rate
		r.Paced = t.tracker.latencies(paced)
	}
	before, err := t.look(ctx)
	if err != nil {
		return r, err
	}
	burst, err := t.create(ctx, "burst", drawn[warming+o.paced:], o.clients, 0)
	if err != nil {
		return r, err
	}
	created := time.Now()
	if err := t.quiet(ctx, burst); err != nil {
		return r, err
	}
	after, err := t.look(ctx)
	if err != nil {
		return r, err
	}
	r.Burst = t.tracker.latencies(burst)
	r.CreateSeconds = created.Sub(t.tracker.first(burst)).Seconds()
	r.Writes = after.writes.since(before.writes)
	r.WritesPerPod = r.Writes.total() / float64(max(r.Burst.Bound, 1))
	r.Processes = make(map[string]usage)
	for name, used := range after.processes {
		used.CPUSeconds -= before.processes[name].CPUSeconds
		r.Processes[name] = used
	}
	r.Failed = t.tracker.count(burst, func(r *record) bool { return r.failed })
	r.Refused, r.Elsewhere, r.Unnoted = t.agents.refused, t.agents.elsewhere, t.agents.unnoted
	if len(t.agents.malformed) > 0 {
		return r, errors.Join(t.agents.malformed[:min(len(t.agents.malformed), 5)]...)
	}
	if t.system.check != nil {
		// Where devices are chosen by the scheduler, the stand-ins' own choice says nothing.
		r.Refused = 0
		if r.Overcommitted, err = t.system.check(ctx, t); err != nil {
			return r, err
		}
	}
	return r, nil
}

// quiet waits until what is to be bound is, runs, and has been told.
func (t *trial) quiet(ctx context.Context, pods []string) error {
	if err := t.tracker.settle(ctx, pods, t.options.stall, t.options.limit); err != nil {
		return err
	}
	if t.agents.tell == nil {
		return nil
	}
	return until(ctx, time.Minute, "all allocations to be told", func(context.Context) (bool, error) { return t.agents.tell.idle() })
}

// looked is what was seen at one moment.
type looked struct {
	writes    writes
	processes map[string]usage
}

func (t *trial) look(ctx context.Context) (looked, error) {
	counted, err := countWrites(ctx, t.plane)
	if err != nil {
		return looked{}, err
	}
	seen := looked{writes: counted, processes: make(map[string]usage)}
	for _, one := range t.plane.running {
		if seen.processes[one.name], err = one.usage(); err != nil {
			return looked{}, err
		}
	}
	return seen, nil
}
