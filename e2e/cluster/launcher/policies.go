package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netns"
)

// The component in this file enforces IPv4 NetworkPolicies in the packet filter of each node. It
// polls the API server every second instead of watching, so a new pod may accept all traffic for a
// second.

const (
	policiesPort   = 10258
	policiesPeriod = time.Second
	// Only FORWARD jumps to policiesChain. Policies therefore do not apply to traffic between a pod
	// and its own node.
	policiesChain = "E2E-POLICIES"
)

type labels map[string]string

// selector is a LabelSelector. An empty selector selects all objects.
type selector struct {
	MatchLabels      labels
	MatchExpressions []struct {
		Key, Operator string
		Values        []string
	}
}

func (s selector) selects(of labels) bool {
	for key, value := range s.MatchLabels {
		if found, ok := of[key]; !ok || found != value {
			return false
		}
	}
	for _, e := range s.MatchExpressions {
		value, ok := of[e.Key]
		in := ok && slices.Contains(e.Values, value)
		holds := map[string]bool{"In": in, "NotIn": !in, "Exists": ok, "DoesNotExist": !ok}
		if !holds[e.Operator] {
			return false
		}
	}
	return true
}

type objectMeta struct {
	Namespace, Name string
	Labels          labels
}

type policy struct {
	Metadata objectMeta
	Spec     struct {
		PodSelector     selector
		PolicyTypes     []string // the API server sets it
		Ingress, Egress []policyRule
	}
}

// policyRule is a rule for ingress (with From) or for egress (with To). A rule without peers
// applies to all peers, and a rule without ports applies to all ports.
type policyRule struct {
	From, To []policyPeer
	Ports    []struct {
		Protocol string
		Port     any // a number or a container port's name
		EndPort  int
	}
}

type policyPeer struct {
	PodSelector, NamespaceSelector *selector
	IPBlock                        *struct {
		CIDR   string
		Except []string
	}
}

type policyPod struct {
	Metadata objectMeta
	Spec     struct {
		NodeName    string
		HostNetwork bool
		Containers  []struct {
			Ports []struct {
				Name          string
				ContainerPort int
				Protocol      string
			}
		}
	}
	Status struct{ Phase, PodIP string }
}

type policyNamespace struct{ Metadata objectMeta }

// policyInputs contains the objects from which the packet filter's rules are computed.
type policyInputs struct {
	policies   []policy
	pods       []policyPod
	namespaces []policyNamespace
}

// isAddressed reports whether the pod has an IPv4 address of its own and has not finished.
func (p policyPod) isAddressed() bool {
	address, err := netip.ParseAddr(p.Status.PodIP)
	return err == nil && address.Is4() && !p.Spec.HostNetwork && p.Status.Phase != "Succeeded" && p.Status.Phase != "Failed"
}

// networks returns the networks of the peers. Without peers, it returns the network of all
// addresses.
func (w policyInputs) networks(namespace string, peers []policyPeer) ([]string, error) {
	if len(peers) == 0 {
		return []string{"0.0.0.0/0"}, nil
	}
	var networks []string
	for _, peer := range peers {
		if block := peer.IPBlock; block != nil {
			if len(block.Except) > 0 {
				return nil, errors.New("ipBlock.except is not supported")
			}
			networks = append(networks, block.CIDR)
			continue
		}
		for _, pod := range w.pods {
			if pod.isAddressed() && w.isPeer(namespace, peer, pod) {
				networks = append(networks, pod.Status.PodIP+"/32")
			}
		}
	}
	return networks, nil
}

func (w policyInputs) isPeer(namespace string, peer policyPeer, pod policyPod) bool {
	if peer.PodSelector != nil && !peer.PodSelector.selects(pod.Metadata.Labels) {
		return false
	}
	if peer.NamespaceSelector == nil {
		return pod.Metadata.Namespace == namespace
	}
	return slices.ContainsFunc(w.namespaces, func(n policyNamespace) bool {
		return n.Metadata.Name == pod.Metadata.Namespace && peer.NamespaceSelector.selects(n.Metadata.Labels)
	})
}

// ports returns the packet filter's match options for the rule's ports. target is the pod with the
// ports, or nil if it is not known.
func (r policyRule) ports(target *policyPod) ([]string, error) {
	if len(r.Ports) == 0 {
		return []string{""}, nil
	}
	var matches []string
	for _, port := range r.Ports {
		protocol := strings.ToLower(port.Protocol)
		var number int
		switch value := port.Port.(type) {
		case nil:
			matches = append(matches, " -p "+protocol)
			continue
		case float64:
			number = int(value)
		case string:
			if target == nil {
				return nil, fmt.Errorf("port %q of a destination pod is not supported", value)
			}
			for _, container := range target.Spec.Containers {
				for _, own := range container.Ports {
					if own.Name == value && own.Protocol == port.Protocol {
						number = own.ContainerPort
					}
				}
			}
			if number == 0 {
				continue // the pod has no port of that name
			}
		}
		matches = append(matches, fmt.Sprintf(" -p %s --dport %d:%d", protocol, number, max(number, port.EndPort)))
	}
	return matches, nil
}

// chains returns the packet filter's chains for the pods of a node, by name.
func (w policyInputs) chains(node string) (map[string][]string, error) {
	// Accept packets of established connections.
	chains := map[string][]string{policiesChain: {"-m conntrack --ctstate ESTABLISHED,RELATED -j RETURN"}}
	for _, pod := range w.pods {
		if pod.Spec.NodeName != node || !pod.isAddressed() {
			continue
		}
		for _, direction := range []struct{ name, mine, theirs string }{{"Ingress", "-d", "-s"}, {"Egress", "-s", "-d"}} {
			isolated, allowed := false, []string(nil)
			for _, p := range w.policies {
				selected := p.Metadata.Namespace == pod.Metadata.Namespace && p.Spec.PodSelector.selects(pod.Metadata.Labels)
				if !selected || !slices.Contains(p.Spec.PolicyTypes, direction.name) {
					continue
				}
				isolated = true
				rules, target := p.Spec.Ingress, &pod
				if direction.name == "Egress" {
					rules, target = p.Spec.Egress, nil
				}
				for _, rule := range rules {
					networks, err := w.networks(pod.Metadata.Namespace, append(rule.From, rule.To...))
					if err != nil {
						return nil, fmt.Errorf("NetworkPolicy %s/%s: %w", p.Metadata.Namespace, p.Metadata.Name, err)
					}
					ports, err := rule.ports(target)
					if err != nil {
						return nil, fmt.Errorf("NetworkPolicy %s/%s: %w", p.Metadata.Namespace, p.Metadata.Name, err)
					}
					for _, network := range networks {
						for _, port := range ports {
							allowed = append(allowed, direction.theirs+" "+network+port+" -j RETURN")
						}
					}
				}
			}
			if isolated {
				chain := fmt.Sprintf("%s-%s-%s", policiesChain, direction.name[:1], strings.ReplaceAll(pod.Status.PodIP, ".", "-"))
				chains[policiesChain] = append(chains[policiesChain], fmt.Sprintf("%s %s/32 -j %s", direction.mine, pod.Status.PodIP, chain))
				// Use REJECT instead of DROP, so that the sender receives an answer and does not wait.
				chains[chain] = append(allowed, "-j REJECT")
			}
		}
	}
	return chains, nil
}

// restoreInput returns the input of iptables-restore for these chains. The input also removes
// chains that are in before but not in chains.
func restoreInput(chains, before map[string][]string) string {
	names, gone := sortedKeys(chains), []string(nil)
	for _, name := range sortedKeys(before) {
		if _, stays := chains[name]; !stays {
			gone = append(gone, name)
		}
	}
	var text strings.Builder
	text.WriteString("*filter\n")
	for _, name := range append(slices.Clone(names), gone...) {
		fmt.Fprintf(&text, ":%s - [0:0]\n", name)
	}
	for _, name := range names {
		for _, rule := range chains[name] {
			fmt.Fprintf(&text, "-A %s %s\n", name, rule)
		}
	}
	for _, name := range gone {
		fmt.Fprintf(&text, "-X %s\n", name)
	}
	text.WriteString("COMMIT\n")
	return text.String()
}

func sortedKeys[V any](of map[string]V) []string {
	keys := make([]string, 0, len(of))
	for key := range of {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// readPolicyInputs reads the objects from which the rules are computed.
func (a *api) readPolicyInputs(ctx context.Context) (policyInputs, error) {
	var world policyInputs
	for path, items := range map[string]any{
		"/apis/networking.k8s.io/v1/networkpolicies": &world.policies, "/api/v1/pods": &world.pods, "/api/v1/namespaces": &world.namespaces,
	} {
		text, err := a.do(ctx, http.MethodGet, path+"?resourceVersion=0", nil)
		if err != nil {
			return world, err
		}
		list := struct{ Items any }{items}
		if err := json.Unmarshal(text, &list); err != nil {
			return world, fmt.Errorf("%s: %w", path, err)
		}
	}
	return world, nil
}

// enforce applies IPv4 NetworkPolicies to the packet filter of each node until ctx is done.
func (c *cluster) enforce(ctx context.Context) error {
	api, err := newAPI(c.layout)
	if err != nil {
		return err
	}
	var trouble atomic.Pointer[error]
	listener, err := net.Listen("tcp", fmt.Sprintf("%s:%d", c.layout.addresses.loopback(), policiesPort))
	if err != nil {
		return err
	}
	go func() {
		_ = http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if err := trouble.Load(); err == nil || *err != nil {
				http.Error(w, "policies are not enforced", http.StatusServiceUnavailable)
			}
		}))
	}()
	type state struct {
		holder process
		chains map[string][]string
	}
	enforced := make(map[string]state)
	ticker := time.NewTicker(policiesPeriod)
	defer ticker.Stop()
	for {
		err := func() error {
			world, err := api.readPolicyInputs(ctx)
			if err != nil {
				return err
			}
			nodes, err := c.layout.nodes()
			if err != nil {
				return err
			}
			var failures []error
			for _, n := range nodes {
				holder, alive, err := c.process(component{kindNode, n.Name})
				if err != nil || !alive {
					continue // the node runs no pod
				}
				before := enforced[n.Name]
				if before.holder != holder {
					before = state{} // the node rebooted with an empty packet filter
				}
				chains, err := world.chains(n.Name)
				if err == nil && fmt.Sprint(chains) != fmt.Sprint(before.chains) {
					err = applyFilter(holder, restoreInput(chains, before.chains))
				}
				if err != nil {
					failures = append(failures, fmt.Errorf("%s: %w", n.Name, err))
					continue
				}
				enforced[n.Name] = state{holder, chains}
			}
			return errors.Join(failures...)
		}()
		if err != nil {
			fmt.Fprintln(os.Stderr, time.Now().UTC().Format(time.RFC3339), err)
		}
		trouble.Store(&err)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// applyFilter passes rules to iptables-restore in the network namespace of a node.
func applyFilter(holder process, rules string) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	machine, err := netns.Get()
	if err != nil {
		return err
	}
	defer machine.Close()
	node, err := netns.GetFromPid(holder.PID)
	if err != nil {
		return err
	}
	defer node.Close()
	if err := netns.Set(node); err != nil {
		return err
	}
	// Exit the process if the thread cannot return to the machine's namespace, because no other
	// goroutine may run on that thread.
	defer func() {
		if err := netns.Set(machine); err != nil {
			panic(err)
		}
	}()
	run := func(input, program string, arguments ...string) error {
		command := exec.Command(program, arguments...)
		command.Stdin = strings.NewReader(input)
		if output, err := command.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", program, err, bytes.TrimSpace(output))
		}
		return nil
	}
	if err := run(rules, "iptables-restore", "--noflush"); err != nil {
		return err
	}
	if run("", "iptables", "-C", "FORWARD", "-j", policiesChain) == nil {
		return nil
	}
	return run("", "iptables", "-I", "FORWARD", "1", "-j", policiesChain)
}
