package main

import (
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"
)

// result contains the results of one system on one number of nodes.
type result struct {
	System        string           `json:"system"`
	Nodes         int              `json:"nodes"`
	Round         int              `json:"round"`
	Rate          float64          `json:"pacedPodsPerSecond"`
	Paced         latencies        `json:"paced"`
	Burst         latencies        `json:"burst"`
	CreateSeconds float64          `json:"createSeconds"`
	WritesPerPod  float64          `json:"writesPerPod"`
	Writes        writes           `json:"writes"`
	Failed        int              `json:"failed"`        // ended as failed
	Refused       int              `json:"refused"`       // bound to a node without enough shares on one GPU
	Elsewhere     []string         `json:"elsewhere"`     // bound to a node whose reserved GPU lacked shares
	Unnoted       int              `json:"unnoted"`       // bound without a reservation
	Overcommitted int              `json:"overcommitted"` // devices with more allocations than shares
	Processes     map[string]usage `json:"processes"`     // CPU during the burst
}

// controlPlane lists the processes of the system. The CPU time per pod includes only these
// processes, and not kwok and the benchmark.
var controlPlane = []string{"operator", "scheduler", "apiserver", "etcd", "controller-manager"}

// cpuPerPod is the control plane's CPU time per pod in milliseconds. Unlike throughput, CPU time
// depends little on the machine's other load.
func (r result) cpuPerPod() float64 {
	seconds := 0.0
	for _, name := range controlPlane {
		seconds += r.Processes[name].CPUSeconds
	}
	return seconds * 1000 / float64(max(r.Burst.Bound, 1))
}

var titles = map[string]string{
	"extended": "(a) extended resource", "dra": "(b) DRA, consumable capacity", "cleave": "(c) Cleave",
}

// median returns the result of the round with the median throughput.
func median(results []result) result {
	sorted := slices.Clone(results)
	slices.SortFunc(sorted, func(a, b result) int {
		switch {
		case a.Burst.PodsPerSecond < b.Burst.PodsPerSecond:
			return -1
		case a.Burst.PodsPerSecond > b.Burst.PodsPerSecond:
			return 1
		}
		return 0
	})
	return sorted[len(sorted)/2]
}

// table returns the results as a table.
func table(results []result) string {
	type key struct {
		nodes  int
		system string
	}
	var keys []key
	grouped := make(map[key][]result)
	for _, r := range results {
		k := key{r.Nodes, r.System}
		if _, ok := grouped[k]; !ok {
			keys = append(keys, k)
		}
		grouped[k] = append(grouped[k], r)
	}
	speed := func(nodes int, system string) float64 {
		if found, ok := grouped[key{nodes, system}]; ok {
			return median(found).Burst.PodsPerSecond
		}
		return 0
	}
	var out strings.Builder
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "nodes\tsystem\tbound\tpods/s\tof (a)\tof (b)\tp50 ms\tp99 ms\tpaced p50\tp99\twrites/pod\tCPU ms/pod\trefused by node\t")
	for _, k := range keys {
		r := median(grouped[k])
		ratio := func(of string) string {
			if base := speed(k.nodes, of); base > 0 {
				return fmt.Sprintf("%.2f", r.Burst.PodsPerSecond/base)
			}
			return "-"
		}
		refused := fmt.Sprint(r.Refused)
		if r.System == "dra" {
			refused = fmt.Sprintf("%d over", r.Overcommitted)
		}
		fmt.Fprintf(w, "%d\t%s\t%d/%d\t%.1f\t%s\t%s\t%.0f\t%.0f\t%.0f\t%.0f\t%.2f\t%.1f\t%s\t\n",
			k.nodes, titles[k.system], r.Burst.Bound, r.Burst.Pods, r.Burst.PodsPerSecond, ratio("extended"), ratio("dra"),
			r.Burst.P50, r.Burst.P99, r.Paced.P50, r.Paced.P99, r.WritesPerPod, r.cpuPerPod(), refused)
	}
	w.Flush()
	for _, k := range keys {
		r := median(grouped[k])
		if len(r.Elsewhere)+r.Failed > 0 || (r.System == "cleave" && r.Unnoted > 0) {
			fmt.Fprintf(&out, "%d nodes, %s: %d bound although their reserved GPU lacked shares, %d without a reservation, %d failed\n",
				k.nodes, titles[k.system], len(r.Elsewhere), r.Unnoted, r.Failed)
			for _, one := range r.Elsewhere[:min(len(r.Elsewhere), 5)] {
				fmt.Fprintf(&out, "  %s\n", one)
			}
		}
	}
	fmt.Fprintln(&out, "\nWrites per pod:")
	for _, k := range keys {
		r := median(grouped[k])
		fmt.Fprintf(&out, "  %d nodes, %s: %s\n", k.nodes, titles[k.system], r.Writes.perPod(max(r.Burst.Bound, 1)))
	}
	fmt.Fprintln(&out, "\nProcesses: CPU seconds in the burst; MiB resident afterwards and at peak")
	for _, k := range keys {
		r := median(grouped[k])
		var parts []string
		for _, name := range controlPlane {
			if used, ok := r.Processes[name]; ok {
				parts = append(parts, fmt.Sprintf("%s %.1f s, %.0f MiB, %.0f", name, used.CPUSeconds, used.ResidentMiB, used.PeakMiB))
			}
		}
		fmt.Fprintf(&out, "  %d nodes, %s: %s\n", k.nodes, titles[k.system], strings.Join(parts, "; "))
	}
	return out.String()
}

// perPod formats the number of writes per pod, by verb and resource. The most frequent writes are
// first.
func (w writes) perPod(pods int) string {
	names := make([]string, 0, len(w))
	for name := range w {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		if w[a] != w[b] {
			return int(w[b] - w[a])
		}
		return strings.Compare(a, b)
	})
	parts := make([]string, 0, len(names))
	for _, name := range names {
		if each := w[name] / float64(pods); each >= 0.005 {
			parts = append(parts, fmt.Sprintf("%.2f %s", each, name))
		}
	}
	return strings.Join(parts, ", ")
}
