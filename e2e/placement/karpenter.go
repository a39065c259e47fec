package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// userKarpenter is Karpenter's user name. The user is an administrator, because the roles of
// Karpenter's chart are not installed.
const userKarpenter = "karpenter"

// pool contains the options of a run with Karpenter.
type pool struct {
	trial trial
	// karpenter is the path of Karpenter's program with its kwok provider. crds lists the directories
	// of Karpenter's custom resource definitions.
	karpenter string
	crds      string
	gpus      int
	pods      int
	slack     int
	limit     time.Duration
	fleet     *fleet
}

// karpenter tests the size of a pool of GPU nodes. The pool must grow from zero nodes for gated
// pods, and must not grow for a pod that fits on no node. After the pods are deleted, the pool must
// shrink to zero nodes.
func karpenter(ctx context.Context, arguments []string) error {
	p := &pool{}
	o := &p.trial.options
	flags := flag.NewFlagSet("placement karpenter", flag.ContinueOnError)
	o.addFlags(flags)
	flags.StringVar(&p.karpenter, "karpenter", "", "path of Karpenter's program with its kwok provider")
	flags.StringVar(&p.crds, "crds", "", "directories with Karpenter's custom resource definitions, separated by commas")
	flags.IntVar(&p.gpus, "gpus", 2, "GPUs of each node")
	flags.IntVar(&p.pods, "pods", 37, "number of pods")
	flags.IntVar(&p.slack, "slack", 1, "nodes that the pool may have beyond the smallest possible number")
	flags.Uint64Var(&o.seed, "seed", 42, "seed of the pods' sizes")
	flags.DurationVar(&p.limit, "limit", 5*time.Minute, "maximum time of each step")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	dir, remove, err := workDir()
	if err != nil {
		return err
	}
	defer remove()
	return p.run(ctx, dir)
}

// run starts the control plane, the operator and Karpenter, runs the scenario, and stops all
// processes.
func (p *pool) run(ctx context.Context, dir string) (err error) {
	t := &p.trial
	t.plane, ctx, err = startPlane(ctx, t.options.programs, dir, t.options.logs, tuning{})
	if err != nil {
		return err
	}
	defer t.plane.stop()
	// Return the error that ended the context, because it caused the later errors.
	defer func() {
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
	}()
	if _, err := t.plane.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
		return err
	}
	t.values = []string{"operator.taintFragmentedNodes=true"}
	if err := installCleave(ctx, t); err != nil {
		return err
	}
	p.fleet = newFleet(t.plane, p.gpus)
	fleetDone := make(chan struct{})
	fleetContext, stop := context.WithCancel(ctx)
	go func() {
		defer close(fleetDone)
		p.fleet.run(fleetContext)
	}()
	defer func() {
		stop()
		<-fleetDone
	}()
	// Use a short time, because the scenario waits until the operator releases a pod as unschedulable.
	if err := startOperator(ctx, t, "--unschedulable-after-seconds=20", "--taint-fragmented"); err != nil {
		return err
	}
	if err := p.startKarpenter(ctx); err != nil {
		return err
	}
	return p.runScenario(ctx)
}

// instanceTypes returns the list of node types for Karpenter's kwok provider. Like a cloud
// provider's list, it contains GPUs but no shares.
func (p *pool) instanceTypes() []object {
	in := func(key, value string) object { return object{"key": key, "operator": "In", "values": []string{value}} }
	return []object{{
		"name": "gpu-node", "architecture": "amd64", "operatingSystems": []string{"linux"},
		"offerings": []object{{"Price": 1, "Available": true, "Requirements": []object{
			in("karpenter.sh/capacity-type", "on-demand"), in("topology.kubernetes.io/zone", "zone-a"),
		}}},
		"resources": object{"cpu": "64", "memory": "512Gi", "ephemeral-storage": "600Gi", "pods": "110", "nvidia.com/gpu": fmt.Sprint(p.gpus)},
	}}
}

// shareRemovalPolicy returns admission objects that remove shares from new nodes. They are
// necessary because nodes of the kwok provider advertise shares as soon as they exist. The kubelet
// of a real node advertises shares only after Cleave's agent has registered.
func shareRemovalPolicy() []object {
	remove := func(field string) string {
		return fmt.Sprintf(`(has(object.status.%[1]s) && %[2]q in object.status.%[1]s ? [JSONPatch{op: "remove", path: "/status/%[1]s/" + jsonpatch.escapeKey(%[2]q)}] : [])`, field, cleaveResource)
	}
	meta := object{"name": "new-kubelets-offer-no-shares"}
	const group = "admissionregistration.k8s.io/v1"
	return []object{
		{"apiVersion": group, "kind": "MutatingAdmissionPolicy", "metadata": meta, "spec": object{
			"failurePolicy": "Fail", "reinvocationPolicy": "Never",
			"matchConstraints": object{"resourceRules": []object{{"apiGroups": []string{""}, "apiVersions": []string{"v1"}, "operations": []string{"CREATE"}, "resources": []string{"nodes"}}}},
			"mutations":        []object{{"patchType": "JSONPatch", "jsonPatch": object{"expression": remove("capacity") + " + " + remove("allocatable")}}},
		}},
		{"apiVersion": group, "kind": "MutatingAdmissionPolicyBinding", "metadata": meta, "spec": object{"policyName": meta["name"]}},
	}
}

// objects returns the node pool, its class, and the overlay with the number of shares of a node.
// docs/how-to/autoscaling.md shows a similar pool and overlay.
func (p *pool) objects() []object {
	return []object{
		{"apiVersion": "karpenter.kwok.sh/v1alpha1", "kind": "KWOKNodeClass", "metadata": object{"name": "default"}, "spec": object{}},
		{
			"apiVersion": "karpenter.sh/v1", "kind": "NodePool", "metadata": object{"name": "gpus"},
			"spec": object{
				"template": object{
					"metadata": object{"labels": object{"largest.cleave.dev/gpu-mps": fmt.Sprint(sharesPerGPU)}},
					"spec": object{
						"nodeClassRef": object{"group": "karpenter.kwok.sh", "kind": "KWOKNodeClass", "name": "default"},
						"requirements": []object{{"key": "karpenter.sh/capacity-type", "operator": "In", "values": []string{"on-demand"}}},
						"expireAfter":  "Never",
					},
				},
				"disruption": object{"consolidationPolicy": "WhenEmpty", "consolidateAfter": "10s", "budgets": []object{{"nodes": "100%"}}},
			},
		},
		{
			"apiVersion": "karpenter.sh/v1alpha1", "kind": "NodeOverlay", "metadata": object{"name": "shares"},
			"spec": object{
				"requirements": []object{{"key": "node.kubernetes.io/instance-type", "operator": "In", "values": []string{"gpu-node"}}},
				"capacity":     object{cleaveResource: fmt.Sprint(p.gpus * sharesPerGPU)},
			},
		},
	}
}

func (p *pool) startKarpenter(ctx context.Context) error {
	plane := p.trial.plane
	for _, folder := range strings.Split(p.crds, ",") {
		if err := plane.kubectl(ctx, nil, "apply", "--server-side", "-f", folder); err != nil {
			return err
		}
	}
	var list bytes.Buffer
	for _, object := range append(shareRemovalPolicy(), p.objects()...) {
		text, err := json.Marshal(object)
		if err != nil {
			return err
		}
		list.Write(append(text, "\n---\n"...))
	}
	if err := plane.kubectl(ctx, nil, "wait", "--for=condition=Established", "--timeout=60s", "crd/nodepools.karpenter.sh", "crd/nodeoverlays.karpenter.sh", "crd/kwoknodeclasses.karpenter.kwok.sh"); err != nil {
		return err
	}
	if err := plane.kubectl(ctx, list.Bytes(), "apply", "--server-side", "-f", "-"); err != nil {
		return err
	}
	types, err := json.Marshal(p.instanceTypes())
	if err != nil {
		return err
	}
	if err := os.WriteFile(plane.path("types.json"), types, 0o644); err != nil {
		return err
	}
	ports, err := freePorts(2)
	if err != nil {
		return err
	}
	_, err = plane.start("karpenter", []string{
		"KUBECONFIG=" + plane.kubeconfig(userKarpenter), "SYSTEM_NAMESPACE=kube-system", "KUBERNETES_MIN_VERSION=1.19.0-0",
		"DISABLE_LEADER_ELECTION=true", "FEATURE_GATES=NodeOverlay=true", "LOG_LEVEL=debug",
		fmt.Sprintf("METRICS_PORT=%d", ports[0]), fmt.Sprintf("HEALTH_PROBE_PORT=%d", ports[1]),
		"INSTANCE_TYPES_FILE_PATH=" + plane.path("types.json"),
	}, p.karpenter)
	return err
}

// runScenario creates and deletes pods, checks the size of the pool after each step, and prints the
// steps.
func (p *pool) runScenario(ctx context.Context) error {
	shares := randomShareCounts(p.trial.options.seed, p.pods)
	gpus := fewestBins(shares, sharesPerGPU)
	exact := (gpus + p.gpus - 1) / p.gpus
	fmt.Printf("%d pods request %v shares: at least %d GPUs, %d nodes of %d\n", p.pods, shares, gpus, exact, p.gpus)

	// Check with an empty pool first. The pool must not grow for this pod.
	if err := p.checkTooLargePod(ctx, "before"); err != nil {
		return err
	}
	began := time.Now()
	var names []string
	for index, size := range shares {
		name := fmt.Sprintf("pod-%02d", index)
		if err := p.create(ctx, name, size); err != nil {
			return err
		}
		names = append(names, name)
	}
	if err := waitUntil(ctx, p.limit, "all pods to run", func(ctx context.Context) (bool, error) {
		running, err := p.countRunning(ctx, names)
		return running == len(names), err
	}); err != nil {
		return errors.Join(err, p.stateError())
	}
	nodes, err := p.countNodes(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("all pods run on %d nodes after %s; %d nodes were added\n", nodes, time.Since(began).Round(time.Second), p.addedNodes())
	if added := p.addedNodes(); added > exact+p.slack {
		return fmt.Errorf("%d nodes were added, %d suffice", added, exact)
	}
	added := p.addedNodes()
	if err := p.checkTooLargePod(ctx, "after"); err != nil {
		return err
	}
	if p.addedNodes() != added {
		return fmt.Errorf("the pool grew by %d nodes for a pod that fits on no node", p.addedNodes()-added)
	}
	began = time.Now()
	if err := p.delete(ctx, names...); err != nil {
		return err
	}
	if err := waitUntil(ctx, p.limit, "the pool to be empty", func(ctx context.Context) (bool, error) {
		nodes, err := p.countNodes(ctx)
		return nodes == 0, err
	}); err != nil {
		return errors.Join(err, p.stateError())
	}
	if p.addedNodes() != added {
		return fmt.Errorf("%d nodes were added without need", p.addedNodes()-added)
	}
	fmt.Printf("no nodes %s after the pods were deleted\n", time.Since(began).Round(time.Second))
	return nil
}

// checkTooLargePod creates a pod that is too large for any GPU, waits until Karpenter reports that
// it adds no node for the pod, and deletes the pod.
func (p *pool) checkTooLargePod(ctx context.Context, when string) error {
	before, err := p.countNodes(ctx)
	if err != nil {
		return err
	}
	name := "too-large-" + when
	if err := p.create(ctx, name, sharesPerGPU+1); err != nil {
		return err
	}
	if err := waitUntil(ctx, p.limit, "Karpenter to refuse a node for "+name, func(ctx context.Context) (bool, error) {
		events, err := p.trial.plane.client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + name})
		if err != nil {
			return false, err
		}
		refused := func(event corev1.Event) bool {
			return event.Reason == "FailedScheduling" && (event.Source.Component == "karpenter" || event.ReportingController == "karpenter")
		}
		return slices.ContainsFunc(events.Items, refused), nil
	}); err != nil {
		return errors.Join(err, p.stateError())
	}
	after, err := p.countNodes(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("a request of %d shares: %d nodes before, %d afterwards\n", sharesPerGPU+1, before, after)
	if after > before {
		return fmt.Errorf("the pool grew from %d to %d nodes for a pod that fits on no node", before, after)
	}
	return p.delete(ctx, name)
}

func (p *pool) create(ctx context.Context, name string, shares int) error {
	created := pod(name)
	requestResource(cleaveResource)(created, shares)
	// Karpenter sorts pods by their CPU and memory before it packs them. Request CPU in proportion to
	// the shares.
	created.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(int64(100*shares), resource.DecimalSI)}
	_, err := p.trial.plane.client.CoreV1().Pods(namespace).Create(ctx, created, metav1.CreateOptions{})
	return err
}

func (p *pool) delete(ctx context.Context, names ...string) error {
	for _, name := range names {
		if err := p.trial.plane.client.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// countRunning returns the number of running pods. It returns an error if a pod has failed.
func (p *pool) countRunning(ctx context.Context, names []string) (int, error) {
	list, err := p.trial.plane.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, err
	}
	running := 0
	for _, pod := range list.Items {
		switch {
		case !slices.Contains(names, pod.Name):
		case pod.Status.Phase == corev1.PodFailed:
			return 0, fmt.Errorf("pod %s failed: %s", pod.Name, pod.Status.Message)
		case pod.Status.Phase == corev1.PodRunning:
			running++
		}
	}
	return running, nil
}

// countNodes returns the number of nodes, including the nodes that Karpenter is about to add.
func (p *pool) countNodes(ctx context.Context) (int, error) {
	nodes, err := p.trial.plane.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, err
	}
	raw, err := p.trial.plane.custom.Get().AbsPath("/apis/karpenter.sh/v1/nodeclaims").Do(ctx).Raw()
	if err != nil {
		return 0, err
	}
	var claims struct{ Items []json.RawMessage }
	if err := json.Unmarshal(raw, &claims); err != nil {
		return 0, err
	}
	return max(len(nodes.Items), len(claims.Items)), nil
}

// addedNodes returns the number of nodes that Karpenter has added since the start of the run.
func (p *pool) addedNodes() int { return int(p.fleet.joined.Load()) }

// stateError returns an error that lists pods and nodes. It uses a new context, because the context
// of the run may have ended.
func (p *pool) stateError() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	list, err := p.trial.plane.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	var text strings.Builder
	fmt.Fprintf(&text, "logs are in %s", filepath.Clean(p.trial.options.logs))
	for _, pod := range list.Items {
		shares := pod.Spec.Containers[0].Resources.Limits[cleaveResource]
		fmt.Fprintf(&text, "\n%s: %s shares, node %q, %s", pod.Name, shares.String(), pod.Spec.NodeName, pod.Status.Phase)
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Status != corev1.ConditionTrue {
				fmt.Fprintf(&text, ", %s: %s", condition.Reason, condition.Message)
			}
		}
	}
	return errors.New(text.String())
}
