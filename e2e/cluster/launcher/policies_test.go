package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// parsePolicyInputs creates a policyInputs from JSON objects of the API.
func parsePolicyInputs(t *testing.T, policies, pods, namespaces string) policyInputs {
	t.Helper()
	var w policyInputs
	for text, into := range map[string]any{policies: &w.policies, pods: &w.pods, namespaces: &w.namespaces} {
		if err := json.Unmarshal([]byte(text), into); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

const policyPods = `[
	{"metadata": {"namespace": "a", "name": "server", "labels": {"app": "server"}},
	 "spec": {"nodeName": "node1", "containers": [{"ports": [{"name": "http", "containerPort": 8080, "protocol": "TCP"}]}]},
	 "status": {"phase": "Running", "podIP": "10.204.1.2"}},
	{"metadata": {"namespace": "b", "name": "reader"}, "spec": {"nodeName": "node2"}, "status": {"phase": "Running", "podIP": "10.204.2.2"}},
	{"metadata": {"namespace": "b", "name": "over"}, "spec": {"nodeName": "node2"}, "status": {"phase": "Failed", "podIP": "10.204.2.3"}},
	{"metadata": {"namespace": "c", "name": "stranger"}, "spec": {"nodeName": "node1"}, "status": {"phase": "Running", "podIP": "10.204.1.9"}}]`

const policyNamespaces = `[{"metadata": {"name": "a"}}, {"metadata": {"name": "b", "labels": {"metrics": "enabled"}}}, {"metadata": {"name": "c"}}]`

func TestPoliciesBecomeChains(t *testing.T) {
	const in, out = "E2E-POLICIES-I-10-204-1-2", "E2E-POLICIES-E-10-204-1-2"
	for what, c := range map[string]struct {
		spec string
		want map[string][]string
	}{
		"by the namespace's label": {
			`{"policyTypes": ["Ingress"], "ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"metrics": "enabled"}}}], "ports": [{"port": 8080, "protocol": "TCP"}]}]}`,
			map[string][]string{in: {"-s 10.204.2.2/32 -p tcp --dport 8080:8080 -j RETURN", "-j REJECT"}},
		},
		"nothing in both directions": {
			`{"policyTypes": ["Ingress", "Egress"], "ingress": [], "egress": []}`,
			map[string][]string{in: {"-j REJECT"}, out: {"-j REJECT"}},
		},
		"only pods of the same namespace, by a port's name": {
			`{"policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": {}}], "ports": [{"port": "http", "protocol": "TCP"}]}]}`,
			map[string][]string{in: {"-s 10.204.1.2/32 -p tcp --dport 8080:8080 -j RETURN", "-j REJECT"}},
		},
		"all peers at some ports": {
			`{"policyTypes": ["Egress"], "egress": [{"ports": [{"port": 443, "protocol": "TCP"}, {"port": 8000, "endPort": 8010, "protocol": "UDP"}]}]}`,
			map[string][]string{out: {"-d 0.0.0.0/0 -p tcp --dport 443:443 -j RETURN", "-d 0.0.0.0/0 -p udp --dport 8000:8010 -j RETURN", "-j REJECT"}},
		},
		"an address": {
			`{"policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": {"cidr": "10.203.0.1/32"}}]}]}`,
			map[string][]string{out: {"-d 10.203.0.1/32 -j RETURN", "-j REJECT"}},
		},
		"peers without pods": {
			`{"policyTypes": ["Ingress"], "ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"metrics": "enabled"}}, "podSelector": {"matchLabels": {"app": "x"}}}]}]}`,
			map[string][]string{in: {"-j REJECT"}},
		},
		"other pods": {`{"podSelector": {"matchLabels": {"app": "other"}}, "policyTypes": ["Ingress"]}`, nil},
	} {
		w := parsePolicyInputs(t, `[{"metadata": {"namespace": "a", "name": "p"}, "spec": `+c.spec+`}]`, policyPods, policyNamespaces)
		chains, err := w.chains("node1")
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		first := chains[policiesChain]
		delete(chains, policiesChain)
		if len(chains) != len(c.want) || len(first) != 1+len(c.want) {
			t.Errorf("%s: %v, through %v", what, chains, first)
		}
		for name, rules := range c.want {
			if !slices.Equal(chains[name], rules) {
				t.Errorf("%s: %s is %q, not %q", what, name, chains[name], rules)
			}
		}
		if elsewhere, err := w.chains("node2"); err != nil || len(elsewhere) != 1 {
			t.Errorf("%s: a node without such pods has %v, %v", what, elsewhere, err)
		}
	}
}

func TestUnsupportedPoliciesAreReported(t *testing.T) {
	for _, rule := range []string{
		`{"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]}`,
	} {
		w := parsePolicyInputs(t, `[{"metadata": {"namespace": "a", "name": "p"}, "spec": {"policyTypes": ["Ingress"], "ingress": [`+rule+`]}}]`, policyPods, policyNamespaces)
		if _, err := w.chains("node1"); err == nil || !strings.Contains(err.Error(), "a/p") {
			t.Errorf("%s: %v", rule, err)
		}
	}
}

func TestASelectorSelectsMatchingLabels(t *testing.T) {
	of := labels{"app": "x", "tier": "y"}
	for text, want := range map[string]bool{
		`{}`: true, `{"matchLabels": {"app": "x"}}`: true, `{"matchLabels": {"app": "z"}}`: false, `{"matchLabels": {"none": ""}}`: false,
		`{"matchExpressions": [{"key": "app", "operator": "In", "values": ["x", "z"]}]}`: true,
		`{"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["x"]}]}`:   false,
		`{"matchExpressions": [{"key": "none", "operator": "NotIn", "values": ["x"]}]}`:  true,
		`{"matchExpressions": [{"key": "app", "operator": "Exists"}]}`:                   true,
		`{"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}`:             false,
	} {
		var s selector
		if err := json.Unmarshal([]byte(text), &s); err != nil || s.selects(of) != want {
			t.Errorf("%s: %v, %v", text, s.selects(of), err)
		}
	}
}

func TestRestoreInputRemovesOldChains(t *testing.T) {
	got := restoreInput(map[string][]string{"A": {"-j RETURN"}}, map[string][]string{"A": nil, "B": {"-j REJECT"}})
	if want := "*filter\n:A - [0:0]\n:B - [0:0]\n-A A -j RETURN\n-X B\nCOMMIT\n"; got != want {
		t.Errorf("%q", got)
	}
}
