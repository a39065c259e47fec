// Command placement measures how fast pods with GPU shares are bound, and at what cost. It compares
// a plain extended resource, DRA with consumable capacity, and Cleave. Each system runs on a
// separate control plane, with kwok instead of kubelets.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// options contains the command line options.
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

// addFlags adds the flags that every command has.
func (o *options) addFlags(flags *flag.FlagSet) {
	flags.StringVar(&o.programs.kube, "kube", "", "directory with kube-apiserver, etcd and other programs")
	flags.StringVar(&o.programs.helm, "helm", "", "helm")
	flags.StringVar(&o.programs.kwok, "kwok", "", "kwok")
	flags.StringVar(&o.programs.operator, "operator", "", "path of the program cleave")
	flags.StringVar(&o.chart, "chart", "charts/cleave", "the chart")
	flags.StringVar(&o.logs, "logs", "", "directory for the components' logs")
}

func parse(arguments []string) (options, error) {
	var o options
	var nodes, pods, names string
	flags := flag.NewFlagSet("placement", flag.ContinueOnError)
	o.addFlags(flags)
	flags.StringVar(&o.out, "out", "", "file for the results, one line of JSON each; empty for none")
	flags.StringVar(&nodes, "nodes", "200,1000", "numbers of nodes, separated by commas")
	flags.StringVar(&pods, "pods", "2000,4000", "numbers of pods of the burst, one for each number of nodes")
	flags.StringVar(&names, "systems", "extended,dra,cleave", "systems to measure, in this order")
	flags.IntVar(&o.paced, "paced", 100, "number of pods that are created at -rate before the burst")
	flags.Float64Var(&o.rate, "rate", 20, "rate of the paced pods, in pods per second")
	flags.IntVar(&o.clients, "clients", 16, "number of concurrent clients that create pods")
	flags.IntVar(&o.rounds, "rounds", 1, "number of rounds; the table shows medians")
	flags.Uint64Var(&o.seed, "seed", 42, "seed of the pods' sizes")
	flags.IntVar(&o.qps, "qps", 0, "maximum requests per second of the scheduler and the controller manager; 0 for their defaults, 50 and 20")
	flags.DurationVar(&o.stall, "stall", 30*time.Second, "time without a bound pod after which the remaining pods count as not bound")
	flags.DurationVar(&o.limit, "limit", time.Minute, "maximum time to create pods and wait for them; pods not bound by then are counted")
	if err := flags.Parse(arguments); err != nil {
		return o, err
	}
	var err error
	if o.nodes, err = parseNumbers(nodes); err != nil {
		return o, fmt.Errorf("-nodes: %w", err)
	}
	if o.pods, err = parseNumbers(pods); err != nil {
		return o, fmt.Errorf("-pods: %w", err)
	}
	if len(o.nodes) != len(o.pods) {
		return o, fmt.Errorf("-nodes has %d numbers, -pods %d", len(o.nodes), len(o.pods))
	}
	known := systems()
	o.systems = strings.Split(names, ",")
	for _, name := range o.systems {
		if !slices.ContainsFunc(known, func(s system) bool { return s.name == name }) {
			return o, fmt.Errorf("-systems: unknown system %q", name)
		}
	}
	if o.clients < 1 || o.rounds < 1 || o.paced < 0 || o.qps < 0 || o.rate <= 0 {
		return o, errors.New("-clients and -rounds must be at least 1, -rate above 0, -paced and -qps at least 0")
	}
	return o, nil
}

func parseNumbers(text string) ([]int, error) {
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

// trial is a run of one system on one number of nodes.
type trial struct {
	options  options
	values   []string // values of the chart, besides those of every run
	system   system
	nodes    int
	plane    *plane
	operator *process
	agents   *agents
	tracker  *tracker
	limit    time.Duration // additional time of each step in a large cluster
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// Discard the log of the client libraries, because the libraries also return their errors.
	klog.SetLogger(logr.Discard())
	var err error
	switch arguments := os.Args[1:]; {
	case len(arguments) > 0 && arguments[0] == "karpenter":
		err = karpenter(ctx, arguments[1:])
	case len(arguments) > 0 && arguments[0] == "scale":
		err = scale(ctx, arguments[1:])
	default:
		var o options
		if o, err = parse(arguments); err == nil {
			err = run(ctx, o)
		}
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
	output, err := createResults(o.out)
	if err != nil {
		return err
	}
	defer output.Close()
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

// createResults creates the file for the results. If the path is empty, the results are discarded.
func createResults(path string) (*os.File, error) {
	if path == "" {
		path = os.DevNull
	}
	return os.Create(path)
}

// run starts the control plane and the system, creates the pods, and stops all processes.
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

// measure creates pods in three steps. The first step warms up the system, and deletes the pods of
// this step. The second step creates pods at a fixed rate, to measure the latency without queueing.
// The third step creates all other pods at the same time.
func (t *trial) measure(ctx context.Context, pods int) (result, error) {
	o := t.options
	r := result{System: t.system.name, Nodes: t.nodes}
	const warming = 20
	drawn := randomShareCounts(o.seed, warming+o.paced+pods)
	warm, err := t.create(ctx, "warm", drawn[:warming], o.clients, 0)
	if err != nil {
		return r, err
	}
	if err := t.tracker.waitUntilSettled(ctx, warm, o.stall, o.limit); err != nil {
		return r, err
	}
	if bound := t.tracker.countPods(warm, func(r *record) bool { return r.node != "" }); bound < warming {
		return r, fmt.Errorf("only %[2]d of the first %[1]d pods were bound", warming, bound)
	}
	if err := t.remove(ctx, warm); err != nil {
		return r, err
	}
	if o.paced > 0 {
		paced, err := t.create(ctx, "paced", drawn[warming:warming+o.paced], o.clients, o.rate)
		if err != nil {
			return r, err
		}
		if err := t.waitUntilQuiet(ctx, paced); err != nil {
			return r, err
		}
		r.Rate = o.rate
		r.Paced = t.tracker.latencies(paced)
	}
	before, err := t.takeSnapshot(ctx)
	if err != nil {
		return r, err
	}
	burst, err := t.create(ctx, "burst", drawn[warming+o.paced:], o.clients, 0)
	if err != nil {
		return r, err
	}
	created := time.Now()
	if err := t.waitUntilQuiet(ctx, burst); err != nil {
		return r, err
	}
	after, err := t.takeSnapshot(ctx)
	if err != nil {
		return r, err
	}
	r.Burst = t.tracker.latencies(burst)
	r.CreateSeconds = created.Sub(t.tracker.firstRequestTime(burst)).Seconds()
	r.Writes = after.writes.since(before.writes)
	r.WritesPerPod = r.Writes.total() / float64(max(r.Burst.Bound, 1))
	r.Processes = make(map[string]usage)
	for name, used := range after.processes {
		used.CPUSeconds -= before.processes[name].CPUSeconds
		r.Processes[name] = used
	}
	r.Failed = t.tracker.countPods(burst, func(r *record) bool { return r.failed })
	r.Refused, r.Elsewhere, r.Unnoted = t.agents.refused, t.agents.elsewhere, t.agents.unnoted
	if len(t.agents.malformed) > 0 {
		return r, errors.Join(t.agents.malformed[:min(len(t.agents.malformed), 5)]...)
	}
	if t.system.check != nil {
		// With DRA, the scheduler chooses devices. The simulated agents choose other devices, so ignore
		// the pods that they refuse.
		r.Refused = 0
		if r.Overcommitted, err = t.system.check(ctx, t); err != nil {
			return r, err
		}
	}
	return r, nil
}

// waitUntilQuiet waits until all pods are bound and running and all allocations are reported.
func (t *trial) waitUntilQuiet(ctx context.Context, pods []string) error {
	if err := t.tracker.waitUntilSettled(ctx, pods, t.options.stall, t.options.limit); err != nil {
		return err
	}
	if t.agents.statuses == nil {
		return nil
	}
	return waitUntil(ctx, time.Minute, "all allocations to be reported", func(context.Context) (bool, error) { return t.agents.statuses.isIdle() })
}

// snapshot contains the values of counters at one time.
type snapshot struct {
	writes    writes
	processes map[string]usage
}

func (t *trial) takeSnapshot(ctx context.Context) (snapshot, error) {
	counted, err := countWrites(ctx, t.plane)
	if err != nil {
		return snapshot{}, err
	}
	seen := snapshot{writes: counted, processes: make(map[string]usage)}
	for _, one := range t.plane.running {
		if seen.processes[one.name], err = one.usage(); err != nil {
			return snapshot{}, err
		}
	}
	return seen, nil
}
