package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// fleet simulates kubelets and agents on nodes that an autoscaler adds and removes. It lists all
// objects several times a second, which is sufficient for a few dozen nodes.
type fleet struct {
	plane *plane
	gpus  int // GPUs of each node

	nodes  map[string]*fleetNode
	joined atomic.Int64 // nodes that have joined so far
	errors []error
}

// fleetNode is one node of a fleet.
type fleetNode struct {
	index   int
	machine machine
	spec    spec
	agent   bool   // the agent's pod exists
	shares  bool   // the kubelet reports shares
	written []byte // the last status of the GpuNode
}

func newFleet(p *plane, gpus int) *fleet {
	return &fleet{plane: p, gpus: gpus, nodes: make(map[string]*fleetNode)}
}

// run updates the fleet until the context ends or an update fails.
func (f *fleet) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := f.update(ctx); err != nil && ctx.Err() == nil {
			f.plane.failed(fmt.Errorf("the simulated nodes: %w", err))
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func (f *fleet) update(ctx context.Context) error {
	core := f.plane.client.CoreV1()
	nodes, err := core.Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	pods, err := core.Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	objects, err := f.gpuNodes(ctx)
	if err != nil {
		return err
	}
	f.addNodes(nodes.Items)
	if err := f.removeNodes(ctx, nodes.Items, objects); err != nil {
		return err
	}
	f.allocateShares(pods.Items)
	for _, node := range nodes.Items {
		if node.DeletionTimestamp == nil {
			object, found := objects[node.Name]
			if err := f.simulateNode(ctx, &node, object, found); err != nil && !apierrors.IsNotFound(err) {
				return fmt.Errorf("node %s: %w", node.Name, err)
			}
		}
	}
	return errors.Join(f.errors...)
}

func (f *fleet) gpuNodes(ctx context.Context) (map[string]gpuNode, error) {
	raw, err := f.plane.custom.Get().AbsPath(gpuNodesPath).Do(ctx).Raw()
	if err != nil {
		return nil, err
	}
	var list struct{ Items []gpuNode }
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, err
	}
	objects := make(map[string]gpuNode, len(list.Items))
	for _, object := range list.Items {
		objects[object.Metadata.Name] = object
	}
	return objects, nil
}

// addNodes adds new nodes.
func (f *fleet) addNodes(nodes []corev1.Node) {
	for _, node := range nodes {
		if _, known := f.nodes[node.Name]; !known && node.DeletionTimestamp == nil {
			f.nodes[node.Name] = &fleetNode{index: int(f.joined.Add(1)), machine: newMachine(f.gpus)}
		}
	}
}

// removeNodes removes the state of nodes that no longer exist. It also deletes the agents' pods and
// the GpuNodes of these nodes, as a cluster's garbage collection does.
func (f *fleet) removeNodes(ctx context.Context, nodes []corev1.Node, objects map[string]gpuNode) error {
	present := make(map[string]bool, len(nodes))
	for _, node := range nodes {
		present[node.Name] = true
	}
	for name := range objects {
		if !present[name] {
			if err := f.plane.custom.Delete().AbsPath(gpuNodesPath, name).Do(ctx).Error(); err != nil && !apierrors.IsNotFound(err) {
				return err
			}
		}
	}
	for name, node := range f.nodes {
		if present[name] {
			continue
		}
		for pod := range node.machine.held {
			f.errors = append(f.errors, fmt.Errorf("node %s was removed while pod %s had shares", name, pod))
		}
		now := int64(0)
		err := f.plane.client.CoreV1().Pods(cleaveNamespace).Delete(ctx, agentName(node.index), metav1.DeleteOptions{GracePeriodSeconds: &now})
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		delete(f.nodes, name)
	}
	return nil
}

func agentName(index int) string { return fmt.Sprintf("cleave-agent-%d", index) }

// allocateShares allocates shares of the reserved GPU to each newly bound pod, and frees the shares
// of deleted pods.
func (f *fleet) allocateShares(pods []corev1.Pod) {
	present := make(map[string]bool, len(pods))
	for _, pod := range pods {
		name := pod.Namespace + "/" + pod.Name
		present[name] = true
		node, known := f.nodes[pod.Spec.NodeName]
		if !known {
			continue
		}
		if _, served := node.machine.held[name]; served {
			continue
		}
		shares := pod.Spec.Containers[0].Resources.Limits[cleaveResource]
		gpu, err := reservedGPU(pod.Annotations[placementAnnotation], pod.Spec.NodeName, node.index, f.gpus)
		if err == nil && (gpu < 0 || !node.machine.allocate(name, gpu, int(shares.Value()))) {
			err = fmt.Errorf("bound without a reservation that its node can serve")
		}
		if err != nil {
			f.errors = append(f.errors, fmt.Errorf("pod %s: %w", name, err))
		}
	}
	for _, node := range f.nodes {
		for pod := range node.machine.held {
			if !present[pod] {
				node.machine.free(pod)
			}
		}
	}
}

// simulateNode simulates the agent and the kubelet of a node. The agent starts and reports the
// node's GPUs. The kubelet advertises shares after the agent has applied the policy.
func (f *fleet) simulateNode(ctx context.Context, node *corev1.Node, desired gpuNode, found bool) error {
	own := f.nodes[node.Name]
	if !own.agent {
		if err := f.startAgent(ctx, node.Name, own.index); err != nil {
			return err
		}
		own.agent = true
	}
	if !found {
		return nil
	}
	if planned, shared := desired.spec(f.gpus); shared {
		own.spec = planned
	}
	text, err := json.Marshal(object{"status": gpuNodeStatus(own.spec, own.index, own.machine)})
	if err != nil {
		return err
	}
	if !bytes.Equal(text, own.written) {
		if err := f.plane.custom.Patch(types.MergePatchType).AbsPath(gpuNodesPath, node.Name, "status").
			Param("fieldManager", "cleave-agent").Body(text).Do(ctx).Error(); err != nil {
			return err
		}
		own.written = text
	}
	if own.spec.PlanID == "" || own.shares {
		return nil
	}
	amount := object{string(cleaveResource): strconv.Itoa(f.gpus * sharesPerGPU)}
	text, err = json.Marshal(object{"status": object{"capacity": amount, "allocatable": amount}})
	if err != nil {
		return err
	}
	_, err = f.plane.client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, text, metav1.PatchOptions{}, "status")
	own.shares = err == nil
	return err
}

// startAgent creates an agent's pod on a node, as the DaemonSet's controller does.
func (f *fleet) startAgent(ctx context.Context, node string, index int) error {
	agent := pod(agentName(index))
	agent.Namespace = cleaveNamespace
	agent.Labels = map[string]string{"app.kubernetes.io/name": "cleave", "app.kubernetes.io/instance": "cleave", "app.kubernetes.io/component": "agent"}
	agent.Spec.NodeName = node
	agent.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	controls := true
	agent.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "cleave-agent", UID: "00000000-0000-4000-8000-000000000001", Controller: &controls}}
	_, err := f.plane.client.CoreV1().Pods(cleaveNamespace).Create(ctx, agent, metav1.CreateOptions{})
	return err
}
