package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
)

// The properties of simulated nodes.
const (
	gpusPerNode  = 8
	sharesPerGPU = 10
)

// Delays of the simulated agents. After a pod is bound, the kubelet and the agent need some time to
// list the pod. Like the agent, the simulation combines a burst of changes in one write, and delays
// allocations longer than releases.
const (
	listingDelay    = 100 * time.Millisecond
	betweenWrites   = 200 * time.Millisecond
	allocationDelay = 500 * time.Millisecond
)

// deviceOf returns the UUID of a node's GPU.
func deviceOf(node, gpu int) string {
	return fmt.Sprintf("GPU-%08x-0000-4000-8000-%012x", node+1, gpu)
}

// podAllocation is the allocation of a pod. All its shares belong to one GPU.
type podAllocation struct {
	gpu int
	ids []int
}

// machine contains the GPUs of one node, and their allocations.
type machine struct {
	used [][sharesPerGPU]bool
	held map[string]podAllocation // allocations by namespace/name of the pod
}

func newMachine(gpus int) machine { return machine{used: make([][sharesPerGPU]bool, gpus)} }

// freeShares returns the number of free shares of a GPU.
func (m *machine) freeShares(gpu int) int {
	free := 0
	for _, used := range m.used[gpu] {
		if !used {
			free++
		}
	}
	return free
}

// fullestGPU returns, among the GPUs with enough free shares, the GPU with the fewest free shares.
// It returns -1 if no GPU has enough. Cleave's agent chooses the same GPU for a pod without a
// reservation.
func (m *machine) fullestGPU(shares int) int {
	best := -1
	for gpu := range m.used {
		if free := m.freeShares(gpu); free >= shares && (best < 0 || free < m.freeShares(best)) {
			best = gpu
		}
	}
	return best
}

// allocate allocates shares of a GPU to a pod. It returns false if too few shares are free.
func (m *machine) allocate(pod string, gpu, shares int) bool {
	if m.freeShares(gpu) < shares {
		return false
	}
	h := podAllocation{gpu: gpu}
	for id := range sharesPerGPU {
		if !m.used[gpu][id] && len(h.ids) < shares {
			m.used[gpu][id] = true
			h.ids = append(h.ids, id)
		}
	}
	if m.held == nil {
		m.held = make(map[string]podAllocation)
	}
	m.held[pod] = h
	return true
}

// free frees a pod's allocation. It returns false if the pod has no allocation.
func (m *machine) free(pod string) bool {
	h, ok := m.held[pod]
	for _, id := range h.ids {
		m.used[h.gpu][id] = false
	}
	delete(m.held, pod)
	return ok
}

// describePods lists the pods that have shares of a GPU, with the number of shares of each pod.
func (m *machine) describePods(gpu int) string {
	var all []string
	for pod, h := range m.held {
		if h.gpu == gpu {
			all = append(all, fmt.Sprintf("%s has %d", pod, len(h.ids)))
		}
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// placement is the content of the annotation in which the operator records a reservation.
type placement struct {
	Nodes map[string][]struct {
		Resource string `json:"resource"`
		Units    int    `json:"units"`
		Device   string `json:"device"`
	} `json:"nodes"`
}

const placementAnnotation = cleaveGroup + "/placement"

// reservedGPU returns the GPU of the node that a pod's annotation reserves, or -1 if the annotation
// reserves no GPU.
func reservedGPU(annotation, node string, index, gpus int) (int, error) {
	if annotation == "" {
		return -1, nil
	}
	var note placement
	if err := json.Unmarshal([]byte(annotation), &note); err != nil {
		return -1, fmt.Errorf("annotation %s: %w", placementAnnotation, err)
	}
	for _, held := range note.Nodes[node] {
		for gpu := range gpus {
			if held.Device == deviceOf(index, gpu) {
				return gpu, nil
			}
		}
		return -1, fmt.Errorf("annotation %s names %s, which %s does not have", placementAnnotation, held.Device, node)
	}
	return -1, nil
}

// agents simulates the kubelets and agents. It allocates shares of one GPU to each bound pod. If no
// GPU has enough free shares, it counts the pod as refused.
type agents struct {
	// The writer of GpuNode statuses, or nil for systems without GpuNodes.
	statuses *statusWriter

	mutex sync.Mutex
	nodes []machine
	names map[string]int

	refused   int      // pods for which no single GPU of their node had enough shares
	elsewhere []string // pods that lacked shares on their reserved GPU, and the users of these shares
	unnoted   int      // pods without a reservation
	malformed []error
}

func newAgents(nodes int) *agents {
	a := &agents{nodes: make([]machine, nodes), names: make(map[string]int, nodes)}
	for i := range nodes {
		a.nodes[i] = newMachine(gpusPerNode)
		a.names[nodeName(i)] = i
	}
	return a
}

// recordBinding allocates shares to a pod that was bound. Call it once for each pod, in the order
// of binding.
func (a *agents) recordBinding(pod, node, annotation string, shares int) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	index, ok := a.names[node]
	if !ok {
		a.malformed = append(a.malformed, fmt.Errorf("%s is bound to %q", pod, node))
		return
	}
	m := &a.nodes[index]
	gpu, err := reservedGPU(annotation, node, index, len(m.used))
	switch {
	case err != nil:
		a.malformed = append(a.malformed, fmt.Errorf("%s: %w", pod, err))
	case gpu < 0:
		a.unnoted++
	case m.allocate(pod, gpu, shares):
		a.scheduleWrite(index, allocationDelay)
		return
	default:
		a.elsewhere = append(a.elsewhere, fmt.Sprintf("%s (%d shares) on %s, GPU %d: %s", pod, shares, node, gpu, m.describePods(gpu)))
	}
	if gpu = m.fullestGPU(shares); gpu < 0 {
		a.refused++
		return
	}
	m.allocate(pod, gpu, shares)
	a.scheduleWrite(index, allocationDelay)
}

// recordDeletion frees the shares of a deleted pod.
func (a *agents) recordDeletion(pod, node string) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if index, ok := a.names[node]; ok && a.nodes[index].free(pod) {
		a.scheduleWrite(index, 0)
	}
}

func (a *agents) scheduleWrite(index int, window time.Duration) {
	if a.statuses != nil {
		a.statuses.scheduleWrite(index, window)
	}
}

// copyMachine returns a copy of a node's current GPUs and allocations.
func (a *agents) copyMachine(index int) machine {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	m := a.nodes[index]
	m.used = slices.Clone(m.used)
	m.held = make(map[string]podAllocation, len(a.nodes[index].held))
	for pod, h := range a.nodes[index].held {
		m.held[pod] = h
	}
	return m
}

// statusWriter writes the GpuNode statuses of the simulated agents to the API server. It combines
// consecutive changes of a node in one write.
type statusWriter struct {
	client rest.Interface
	ctx    context.Context
	agents *agents
	specs  []spec // by node

	mutex   sync.Mutex
	nodes   []nodeWrite
	pending int
	slots   chan struct{}
	writes  atomic.Int64
	failed  atomic.Pointer[error]
}

// nodeWrite is the state of the writes of one node's status.
type nodeWrite struct {
	due     *time.Timer // time of the planned write
	at      time.Time
	writing bool // a write is in progress
	stale   bool // changes since its start need another write
	window  time.Duration
	last    time.Time
	version string // resource version of the last write
}

func newStatusWriter(ctx context.Context, client rest.Interface, a *agents) *statusWriter {
	count := len(a.nodes)
	// The limit is higher than the number of concurrent writes by the agents of a real cluster.
	return &statusWriter{client: client, ctx: ctx, agents: a, specs: make([]spec, count), nodes: make([]nodeWrite, count), slots: make(chan struct{}, 64)}
}

// scheduleWrite plans a write of the node's status. The write includes all changes before its
// start.
func (t *statusWriter) scheduleWrite(index int, window time.Duration) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	node := &t.nodes[index]
	if node.writing {
		if !node.stale || window < node.window {
			node.stale, node.window = true, window
		}
		return
	}
	t.writeWithin(index, window)
}

// writeWithin plans a write of the node's status within window. If a planned write is due later, it
// moves that write forward. The caller must hold the mutex.
func (t *statusWriter) writeWithin(index int, window time.Duration) {
	node := &t.nodes[index]
	wait := max(listingDelay+window, time.Until(node.last.Add(betweenWrites)))
	at := time.Now().Add(wait)
	if node.due != nil {
		if at.Before(node.at) && node.due.Stop() {
			node.due.Reset(wait)
			node.at = at
		}
		return
	}
	t.pending++
	node.at = at
	node.due = time.AfterFunc(wait, func() {
		t.slots <- struct{}{}
		t.mutex.Lock()
		// Later changes need another write.
		node.due, node.writing, node.stale = nil, true, false
		t.mutex.Unlock()
		err := t.write(t.ctx, index)
		<-t.slots
		if err != nil {
			t.failed.Store(&err)
		}
		t.mutex.Lock()
		defer t.mutex.Unlock()
		t.pending--
		node.writing, node.last = false, time.Now()
		if node.stale {
			t.writeWithin(index, node.window)
		}
	})
}

// isIdle reports whether all changes have been written, and returns the last error of a write.
func (t *statusWriter) isIdle() (bool, error) {
	if err := t.failed.Load(); err != nil {
		return false, *err
	}
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return t.pending == 0, nil
}

// write writes the whole status, as the agent does. It replaces the status of the known version of
// the object. If no version is known, or the object has changed, it applies a merge patch.
func (t *statusWriter) write(ctx context.Context, index int) error {
	name := nodeName(index)
	current := gpuNodeStatus(t.specs[index], index, t.agents.copyMachine(index))
	t.writes.Add(1)
	t.mutex.Lock()
	version := t.nodes[index].version
	t.mutex.Unlock()
	err := error(nil)
	var raw []byte
	if version != "" {
		var body []byte
		if body, err = json.Marshal(object{
			"apiVersion": cleaveGroup + "/v1alpha1", "kind": "GpuNode",
			"metadata": object{"name": name, "resourceVersion": version}, "status": current,
		}); err != nil {
			return err
		}
		raw, err = t.client.Put().AbsPath(gpuNodesPath, name, "status").Param("fieldManager", "cleave-agent").Body(body).Do(ctx).Raw()
	}
	if version == "" || apierrors.IsConflict(err) {
		var body []byte
		if body, err = json.Marshal(object{"status": current}); err != nil {
			return err
		}
		raw, err = t.client.Patch(types.MergePatchType).AbsPath(gpuNodesPath, name, "status").
			Param("fieldManager", "cleave-agent").Body(body).Do(ctx).Raw()
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("write the status of %s: %w", name, err)
	}
	var written struct {
		Metadata struct {
			ResourceVersion string `json:"resourceVersion"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(raw, &written); err != nil {
		return fmt.Errorf("the answer to the status of %s: %w", name, err)
	}
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.nodes[index].version = written.Metadata.ResourceVersion
	return nil
}

// spec is the part of a GpuNode's spec that the simulated agents use.
type spec struct {
	Generation int64
	PlanID     string
	Memory     []uint64 // MiB of k shares at index k-1
}

// gpuNode is the part of a GpuNode that the simulated agents use.
type gpuNode struct {
	Metadata struct {
		Name       string `json:"name"`
		Generation int64  `json:"generation"`
	} `json:"metadata"`
	Spec struct {
		PlanID string `json:"planId"`
		GPUs   []struct {
			UUID      string `json:"uuid"`
			Partition struct {
				Mps *struct {
					Slices []struct {
						Count     int      `json:"count"`
						MemoryMiB []uint64 `json:"memoryMib"`
					} `json:"slices"`
				} `json:"mps"`
			} `json:"partition"`
		} `json:"gpus"`
	} `json:"spec"`
}

// spec returns the object's spec. It returns false if the spec does not yet partition all GPUs into
// shares.
func (n gpuNode) spec(gpus int) (spec, bool) {
	s := spec{Generation: n.Metadata.Generation, PlanID: n.Spec.PlanID}
	for _, gpu := range n.Spec.GPUs {
		if mps := gpu.Partition.Mps; mps == nil || len(mps.Slices) != 1 || mps.Slices[0].Count != sharesPerGPU {
			return s, false
		}
		s.Memory = gpu.Partition.Mps.Slices[0].MemoryMiB
	}
	return s, len(n.Spec.GPUs) == gpus
}

// gpuNodeStatus returns the status of a GpuNode with H100s, as the agent writes it. Without a plan,
// the GPUs are whole.
func gpuNodeStatus(s spec, index int, m machine) object {
	gpus := make([]object, len(m.used))
	total := 0
	for gpu := range m.used {
		uuid := deviceOf(index, gpu)
		inUse := sharesPerGPU - m.freeShares(gpu)
		total += inUse
		described := object{
			"uuid": uuid, "index": gpu, "model": "NVIDIA H100 80GB HBM3", "memoryMib": 81559, "sms": 132,
			"pci": fmt.Sprintf("00000000:%02x:00.0", gpu+1), "numa": gpu / 4, "health": object{"healthy": true},
			"mig":  object{"enabled": false, "instances": []object{}},
			"mode": "Whole", "slices": []object{{"device": uuid, "resource": "nvidia.com/gpu", "total": 1, "inUse": 0, "unhealthy": 0}},
		}
		if s.PlanID != "" {
			described["mode"] = "Mps"
			described["slices"] = []object{{"device": uuid, "resource": cleaveResource, "total": sharesPerGPU, "inUse": inUse, "unhealthy": 0}}
			described["mps"] = []object{{"device": uuid, "state": "Active", "pid": 4000 + gpu, "door": "Hard", "restarts": 0}}
			described["allocations"] = allocations(s, uuid, gpu, m)
		}
		gpus[gpu] = described
	}
	modes := "Whole"
	slices := fmt.Sprintf("0/%d", len(gpus))
	if s.PlanID != "" {
		modes, slices = "Mps", fmt.Sprintf("%d/%d", total, len(gpus)*sharesPerGPU)
	}
	condition := func(name, reason string) object {
		return object{"type": name, "status": "True", "reason": reason, "message": "", "observedGeneration": s.Generation, "lastTransitionTime": "2026-01-01T00:00:00Z"}
	}
	return object{
		"observedGeneration": s.Generation, "planId": s.PlanID, "agentVersion": "0.1.0", "driver": "580.159.04",
		"bootId": fmt.Sprintf("00000000-0000-4000-8000-%012x", index), "gpus": gpus, "steps": []object{},
		"models":     []object{{"model": "NVIDIA H100 80GB HBM3", "migProfiles": migProfiles}},
		"summary":    object{"gpus": len(gpus), "models": "NVIDIA H100 80GB HBM3", "modes": modes, "slices": slices},
		"conditions": []object{condition("Ready", "Serving"), condition("Applied", "Applied")},
	}
}

// allocations returns the allocations of a GPU, sorted by the name of the pod.
func allocations(s spec, uuid string, gpu int, m machine) []object {
	rows := make([]object, 0, sharesPerGPU)
	for pod, h := range m.held {
		if h.gpu != gpu {
			continue
		}
		ids := make([]string, len(h.ids))
		for i, id := range h.ids {
			ids[i] = fmt.Sprintf("%s::%d", uuid, id)
		}
		shares := len(ids)
		row := object{"pod": pod, "container": container, "resource": cleaveResource, "device": uuid, "ids": ids,
			"threads": 100 * shares / sharesPerGPU, "sms": 132 * shares / sharesPerGPU, "clients": 0}
		if shares <= len(s.Memory) {
			row["memoryMib"] = s.Memory[shares-1]
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b object) int {
		if a["pod"].(string) < b["pod"].(string) {
			return -1
		}
		return 1
	})
	return rows
}

// migProfiles are NVML's profiles of an H100 with 80 GB. With them, a status has a realistic
// length.
var migProfiles = []object{
	{"name": "1g.10gb", "memoryMib": 9856, "sms": 16, "size": 1, "starts": []int{0, 1, 2, 3, 4, 5, 6}},
	{"name": "1g.10gb+me", "memoryMib": 9856, "sms": 16, "size": 1, "starts": []int{0, 1, 2, 3, 4, 5, 6}},
	{"name": "1g.20gb", "memoryMib": 19968, "sms": 26, "size": 2, "starts": []int{0, 2, 4, 6}},
	{"name": "2g.20gb", "memoryMib": 19968, "sms": 32, "size": 2, "starts": []int{0, 2, 4}},
	{"name": "3g.40gb", "memoryMib": 40192, "sms": 60, "size": 4, "starts": []int{0, 4}},
	{"name": "4g.40gb", "memoryMib": 40192, "sms": 64, "size": 4, "starts": []int{0}},
	{"name": "7g.80gb", "memoryMib": 80896, "sms": 132, "size": 8, "starts": []int{0}},
}
