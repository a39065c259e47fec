package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	sigsyaml "sigs.k8s.io/yaml"
)

const (
	namespace       = "placement"
	container       = "main"
	plainResource   = "example.com/share"
	cleaveNamespace = "cleave-system"
	cleaveGroup     = "cleave.dev"
	cleaveResource  = "nvidia.com/gpu-mps"
	gpuNodesPath    = "/apis/" + cleaveGroup + "/v1alpha1/gpunodes"
	policiesPath    = "/apis/" + cleaveGroup + "/v1alpha1/sharingpolicies"
	draDriver       = "gpu.example.com"
	image           = "localhost/pause:dev"
)

// object is a part of an API object. JSON is valid YAML.
type object = map[string]any

// system is a way in which pods can request shares of a GPU.
type system struct {
	name     string
	resource corev1.ResourceName // the nodes' resource, or "" without one
	// prepare installs the system after the nodes are Ready.
	prepare func(context.Context, *trial) error
	// request adds a request for shares to a pod.
	request func(pod *corev1.Pod, shares int)
	// check returns the number of overcommitted GPUs at the end. It is nil if the simulated agents
	// detect overcommitted GPUs.
	check func(context.Context, *trial) (overcommitted int, err error)
}

func systems() []system {
	return []system{
		{name: "extended", resource: plainResource, request: requestResource(plainResource)},
		{name: "dra", prepare: prepareDRA, request: requestByClaim, check: checkDRA},
		{name: "cleave", resource: cleaveResource, prepare: prepareCleave, request: requestResource(cleaveResource)},
	}
}

func requestResource(name corev1.ResourceName) func(*corev1.Pod, int) {
	return func(pod *corev1.Pod, shares int) {
		pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{name: *resource.NewQuantity(int64(shares), resource.DecimalSI)}
	}
}

// pod returns a pod without resource requests.
func pod(name string) *corev1.Pod {
	grace := int64(0)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: corev1.PodSpec{
			Containers:                    []corev1.Container{{Name: container, Image: image}},
			TerminationGracePeriodSeconds: &grace,
		},
	}
}

func nodeName(index int) string { return fmt.Sprintf("node-%04d", index) }

// forEach calls do for each index from 0 to count-1, with at most atOnce concurrent calls. It stops
// at the first error.
func forEach(ctx context.Context, count, atOnce int, do func(context.Context, int) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	next := make(chan int)
	var group sync.WaitGroup
	for range atOnce {
		group.Go(func() {
			for index := range next {
				if err := do(ctx, index); err != nil {
					cancel(err)
				}
			}
		})
	}
	for index := 0; index < count && ctx.Err() == nil; index++ {
		select {
		case next <- index:
		case <-ctx.Done():
		}
	}
	close(next)
	group.Wait()
	return context.Cause(ctx)
}

const atOnce = 32

// makeNodes creates the simulated nodes and waits until they are Ready.
func makeNodes(ctx context.Context, t *trial) error {
	err := forEach(ctx, t.nodes, atOnce, func(ctx context.Context, index int) error {
		name := nodeName(index)
		has := corev1.ResourceList{
			corev1.ResourceCPU: resource.MustParse("192"), corev1.ResourceMemory: resource.MustParse("2Ti"), corev1.ResourcePods: resource.MustParse("250"),
		}
		if t.system.resource != "" {
			has[t.system.resource] = *resource.NewQuantity(gpusPerNode*sharesPerGPU, resource.DecimalSI)
		}
		_, err := t.plane.client.CoreV1().Nodes().Create(ctx, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name, corev1.LabelOSStable: "linux"}},
			Status:     corev1.NodeStatus{Capacity: has, Allocatable: has},
		}, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return fmt.Errorf("create the nodes: %w", err)
	}
	return waitUntil(ctx, time.Minute+t.limit, "kwok to make all nodes Ready", func(ctx context.Context) (bool, error) {
		nodes, err := t.plane.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		ready := 0
		for _, node := range nodes.Items {
			for _, condition := range node.Status.Conditions {
				if condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue {
					ready++
				}
			}
		}
		return ready == t.nodes, nil
	})
}

// prepareDRA creates a DeviceClass, a ResourceSlice for each node, and a ResourceClaimTemplate for
// each number of shares.
func prepareDRA(ctx context.Context, t *trial) error {
	api := t.plane.client.ResourceV1()
	one, all, several := resource.MustParse("1"), *resource.NewQuantity(sharesPerGPU, resource.DecimalSI), true
	_, err := api.DeviceClasses().Create(ctx, &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: draDriver},
		Spec: resourcev1.DeviceClassSpec{Selectors: []resourcev1.DeviceSelector{
			{CEL: &resourcev1.CELDeviceSelector{Expression: fmt.Sprintf("device.driver == %q", draDriver)}},
		}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create the device class: %w", err)
	}
	err = forEach(ctx, t.nodes, atOnce, func(ctx context.Context, index int) error {
		name := nodeName(index)
		devices := make([]resourcev1.Device, gpusPerNode)
		for gpu := range devices {
			devices[gpu] = resourcev1.Device{
				Name: fmt.Sprintf("gpu-%d", gpu), AllowMultipleAllocations: &several,
				Capacity: map[resourcev1.QualifiedName]resourcev1.DeviceCapacity{"shares": {
					Value: all,
					RequestPolicy: &resourcev1.CapacityRequestPolicy{
						Default: &one, ValidRange: &resourcev1.CapacityRequestPolicyRange{Min: &one, Max: &all, Step: &one},
					},
				}},
			}
		}
		_, err := api.ResourceSlices().Create(ctx, &resourcev1.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: resourcev1.ResourceSliceSpec{
				Driver: draDriver, NodeName: &name, Devices: devices,
				Pool: resourcev1.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1},
			},
		}, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return fmt.Errorf("create the resource slices: %w", err)
	}
	for shares := 1; shares <= sharesPerGPU; shares++ {
		_, err := api.ResourceClaimTemplates(namespace).Create(ctx, &resourcev1.ResourceClaimTemplate{
			ObjectMeta: metav1.ObjectMeta{Name: templateName(shares)},
			Spec: resourcev1.ResourceClaimTemplateSpec{Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
				Requests: []resourcev1.DeviceRequest{{Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{
					DeviceClassName: draDriver,
					Capacity: &resourcev1.CapacityRequirements{Requests: map[resourcev1.QualifiedName]resource.Quantity{
						"shares": *resource.NewQuantity(int64(shares), resource.DecimalSI),
					}},
				}}},
			}}},
		}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("create a claim template: %w", err)
		}
	}
	return nil
}

func templateName(shares int) string { return "shares-" + strconv.Itoa(shares) }

func requestByClaim(pod *corev1.Pod, shares int) {
	name := templateName(shares)
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: &name}}
	pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
}

// checkDRA adds up the claims on each device, and returns the number of overcommitted devices.
func checkDRA(ctx context.Context, t *trial) (int, error) {
	claims, err := t.plane.client.ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return 0, fmt.Errorf("list the claims: %w", err)
	}
	consumed := make(map[string]int64)
	for _, claim := range claims.Items {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			shares, ok := result.ConsumedCapacity["shares"]
			if !ok {
				return 0, fmt.Errorf("claim %s consumes no shares: the API server or the scheduler has no consumable capacity", claim.Name)
			}
			consumed[result.Pool+"/"+result.Device] += shares.Value()
		}
	}
	over := 0
	for _, shares := range consumed {
		if shares > sharesPerGPU {
			over++
		}
	}
	return over, nil
}

// prepareCleave installs the chart without its workloads, adds an agent's pod to each node, starts
// the operator, and makes the simulated agents apply the policy.
func prepareCleave(ctx context.Context, t *trial) error {
	if err := installCleave(ctx, t); err != nil {
		return err
	}
	if err := makeAgents(ctx, t); err != nil {
		return err
	}
	if err := startOperator(ctx, t); err != nil {
		return err
	}
	return simulateAgentStart(ctx, t)
}

// kubectl runs kubectl as an administrator.
func (p *plane) kubectl(ctx context.Context, input []byte, arguments ...string) error {
	command := exec.CommandContext(ctx, p.programs.kubernetes("kubectl"), append([]string{"--kubeconfig=" + p.kubeconfig(userAdmin)}, arguments...)...)
	command.Stdin = bytes.NewReader(input)
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl %q: %w\n%s", arguments, err, output)
	}
	return nil
}

// installCleave installs the chart without its workloads, and a policy.
func installCleave(ctx context.Context, t *trial) error {
	manifests, err := t.chart(ctx)
	if err != nil {
		return err
	}
	_, err = t.plane.client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: cleaveNamespace}}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	if err := t.plane.kubectl(ctx, manifests, "apply", "--server-side", "-f", "-"); err != nil {
		return err
	}
	if err := t.plane.kubectl(ctx, nil, "wait", "--for=condition=Established", "--timeout=60s", "crd/gpunodes."+cleaveGroup, "crd/sharingpolicies."+cleaveGroup); err != nil {
		return err
	}
	policy, err := json.Marshal(object{
		"apiVersion": cleaveGroup + "/v1alpha1", "kind": "SharingPolicy", "metadata": object{"name": "ten-shares"},
		"spec": object{"mode": "Mps", "mps": object{"units": sharesPerGPU}},
	})
	if err != nil {
		return err
	}
	if err := t.plane.custom.Post().AbsPath(policiesPath).Body(policy).Do(ctx).Error(); err != nil {
		return fmt.Errorf("create the policy: %w", err)
	}
	return nil
}

// startOperator starts the operator and waits until it is ready.
func startOperator(ctx context.Context, t *trial, arguments ...string) (err error) {
	t.operator, _, err = startOperatorAs(ctx, t, "placement", t.plane.kubeconfig(userOperator), arguments...)
	return err
}

// startOperatorAs starts an operator with the identity of the pod with this name, and waits until
// the operator is ready. It returns the address of the operator's metrics.
func startOperatorAs(ctx context.Context, t *trial, pod, kubeconfig string, arguments ...string) (*process, string, error) {
	ports, err := freePorts(1)
	if err != nil {
		return nil, "", err
	}
	address := fmt.Sprintf("127.0.0.1:%d", ports[0])
	started, err := t.plane.start("operator", []string{"KUBECONFIG=" + kubeconfig, "POD_NAME=" + pod},
		append([]string{t.plane.programs.operator, "operator", "--namespace=" + cleaveNamespace, "--metrics-addr=" + address}, arguments...)...)
	if err != nil {
		return nil, "", err
	}
	return started, address, waitUntil(ctx, startTimeout+t.limit, "the operator to be ready", func(ctx context.Context) (bool, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/readyz", nil)
		if err != nil {
			return false, err
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return false, nil
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK, nil
	})
}

// chart renders the chart's objects without its workloads, such as CRDs, roles and admission
// objects. The admission objects include the policy that adds the placement gate to pods.
func (t *trial) chart(ctx context.Context) ([]byte, error) {
	var stderr bytes.Buffer
	arguments := []string{"template", "cleave", t.options.chart, "--namespace", cleaveNamespace, "--kube-version", "1.36", "--set", "admission.gate=policy"}
	for _, value := range t.values {
		arguments = append(arguments, "--set", value)
	}
	command := exec.CommandContext(ctx, t.plane.programs.helm, arguments...)
	// Set HOME, so that Helm does not read or write the user's own configuration.
	command.Env = append(os.Environ(), "HOME="+t.plane.dir)
	command.Stderr = &stderr
	text, err := command.Output()
	if err != nil {
		return nil, fmt.Errorf("helm template: %w\n%s", err, stderr.Bytes())
	}
	reader := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	var kept bytes.Buffer
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return kept.Bytes(), nil
		}
		if err != nil {
			return nil, err
		}
		var meta metav1.TypeMeta
		if err := sigsyaml.Unmarshal(document, &meta); err != nil {
			return nil, fmt.Errorf("the chart's output: %w", err)
		}
		switch meta.Kind {
		case "", "Deployment", "DaemonSet":
			// Omit workloads: the operator runs outside the cluster, and the components of nodes are
			// simulated.
		default:
			kept.WriteString("---\n")
			kept.Write(document)
		}
	}
}

// makeAgents creates an agent's pod on each node. kwok makes the pods Ready.
func makeAgents(ctx context.Context, t *trial) error {
	pods := t.plane.client.CoreV1().Pods(cleaveNamespace)
	err := forEach(ctx, t.nodes, atOnce, func(ctx context.Context, index int) error {
		agent := pod(fmt.Sprintf("cleave-agent-%04d", index))
		agent.Namespace = cleaveNamespace
		agent.Labels = map[string]string{"app.kubernetes.io/name": "cleave", "app.kubernetes.io/instance": "cleave", "app.kubernetes.io/component": "agent"}
		agent.Spec.NodeName = nodeName(index)
		_, err := pods.Create(ctx, agent, metav1.CreateOptions{})
		return err
	})
	if err != nil {
		return fmt.Errorf("create the agents' pods: %w", err)
	}
	return waitUntil(ctx, 2*time.Minute+t.limit, "the agents' pods to be Ready", func(ctx context.Context) (bool, error) {
		found, err := pods.List(ctx, metav1.ListOptions{FieldSelector: "status.phase=Running"})
		return err == nil && len(found.Items) == t.nodes, err
	})
}

// simulateAgentStart simulates the start of all agents. The agents first report whole GPUs. After
// the operator has planned, they report shares.
func simulateAgentStart(ctx context.Context, t *trial) error {
	t.agents.statuses = newStatusWriter(ctx, t.plane.custom, t.agents)
	statuses := t.agents.statuses
	nodes := func(ctx context.Context) ([]gpuNode, error) {
		raw, err := t.plane.custom.Get().AbsPath(gpuNodesPath).Do(ctx).Raw()
		if err != nil {
			return nil, fmt.Errorf("list the GpuNodes: %w", err)
		}
		var list struct{ Items []gpuNode }
		return list.Items, json.Unmarshal(raw, &list)
	}
	if err := waitUntil(ctx, 5*time.Minute+t.limit, "the operator to create a GpuNode for each node", func(ctx context.Context) (bool, error) {
		found, err := nodes(ctx)
		return len(found) == t.nodes, err
	}); err != nil {
		return err
	}
	if err := forEach(ctx, t.nodes, atOnce, statuses.write); err != nil {
		return err
	}
	if err := waitUntil(ctx, 5*time.Minute+t.limit, "the operator to plan all nodes", func(ctx context.Context) (bool, error) {
		found, err := nodes(ctx)
		if err != nil {
			return false, err
		}
		planned := 0
		for _, node := range found {
			index, known := t.agents.names[node.Metadata.Name]
			if s, shared := node.spec(gpusPerNode); known && shared {
				statuses.specs[index] = s
				planned++
			}
		}
		return planned == t.nodes, nil
	}); err != nil {
		return err
	}
	if err := forEach(ctx, t.nodes, atOnce, statuses.write); err != nil {
		return err
	}
	return waitUntil(ctx, 5*time.Minute+t.limit, "the policy to be Ready", func(ctx context.Context) (bool, error) {
		raw, err := t.plane.custom.Get().AbsPath(policiesPath, "ten-shares").Do(ctx).Raw()
		if err != nil {
			return false, err
		}
		var policy struct {
			Status struct {
				Conditions []metav1.Condition `json:"conditions"`
			} `json:"status"`
		}
		if err := json.Unmarshal(raw, &policy); err != nil {
			return false, err
		}
		for _, condition := range policy.Status.Conditions {
			if condition.Type == "Ready" {
				return condition.Status == metav1.ConditionTrue, nil
			}
		}
		return false, nil
	})
}
