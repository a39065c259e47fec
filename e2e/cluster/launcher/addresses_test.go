package main

import (
	"net"
	"net/netip"
	"strings"
	"testing"
)

func TestTheFirstClusterHasTheDocumentedAddresses(t *testing.T) {
	a, n := addresses(0), node{Name: "node1", Index: 1}
	for got, want := range map[string]string{
		a.nodeNetwork(): "10.203.0.0/24", a.podNetwork(): "10.204.0.0/16", a.serviceNetwork(): "10.205.0.0/24",
		a.host(): "10.203.0.1", a.node(n): "10.203.0.11", a.pods(n): "10.204.1.0/24", a.apiService(): "10.205.0.1",
		a.loopback(): "127.0.0.1", a.bridge(): "cleave-e2e", a.device(n): "ce2e-1",
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// Two clusters, or two nodes of one cluster, must have no address, network or device in common.
// Otherwise, the tests of both clusters fail.
func TestClustersAndNodesShareNoAddressAndNoDevice(t *testing.T) {
	seen := make(map[string]bool)
	claim := func(values ...string) {
		for _, value := range values {
			if seen[value] {
				t.Fatalf("%s twice", value)
			}
			seen[value] = true
		}
	}
	var whole []netip.Prefix
	for a := range addresses(maxClusters) {
		claim(a.host(), a.loopback(), a.bridge(), a.apiService(), a.dnsService())
		for _, text := range a.networks() {
			network := netip.MustParsePrefix(text)
			for _, other := range whole {
				if network.Overlaps(other) {
					t.Fatalf("%s overlaps %s", network, other)
				}
			}
			whole = append(whole, network)
		}
		for index := 1; index <= maxNodes; index++ {
			n := node{Name: "n", Index: index}
			claim(a.node(n), a.pods(n), a.device(n))
			if !a.contains(a.node(n)) || !a.contains(a.pods(n)) || len(a.device(n)) > 15 {
				t.Fatalf("node %d of cluster %d: %s %s %s", index, a, a.node(n), a.pods(n), a.device(n))
			}
		}
		if len(a.bridge()) > 15 || !a.contains(a.host()) || !a.contains(a.apiService()) || a.contains((a + 1).host()) {
			t.Fatalf("cluster %d: %s %s", a, a.bridge(), a.host())
		}
	}
}

func TestOnlyAddressesOfTheClusterAreContained(t *testing.T) {
	for _, text := range []string{"10.206.0.1", "0.0.0.0/0", "10.0.0.0/8", "-A", ""} {
		if addresses(0).contains(text) {
			t.Errorf("the first cluster contains %q", text)
		}
	}
}

func TestRulesReturnsOnlyRulesOfTheCluster(t *testing.T) {
	saved := `*nat
-A POSTROUTING -s 10.204.1.2/32 -j MASQUERADE
-A POSTROUTING -s 192.168.0.0/16 -j MASQUERADE
-A KUBE-SERVICES -d 10.205.0.1/32 -p tcp -j KUBE-SVC
-A POSTROUTING -s 10.207.1.2/32 -j MASQUERADE
COMMIT`
	if got := addresses(0).rules(saved); len(got) != 2 {
		t.Errorf("got %q", got)
	}
}

func TestFreeAddressesAreTheLowestWithoutAConflict(t *testing.T) {
	all := make([]addresses, maxClusters)
	for i := range all {
		all[i] = addresses(i)
	}
	for what, c := range map[string]struct {
		taken  []addresses
		routes []string
		want   addresses
	}{
		"no other cluster":                     {nil, []string{"192.168.0.0/16"}, 0},
		"one other cluster":                    {[]addresses{0}, nil, 1},
		"the first cluster was removed":        {[]addresses{1, 2}, nil, 0},
		"a cluster in another state directory": {nil, []string{addresses(0).nodeNetwork()}, 1},
		"a route inside a pod network":         {nil, []string{"10.204.77.0/24"}, 1},
		"a route around several networks":      {nil, []string{"10.200.0.0/13"}, 2},
	} {
		var routes []net.IPNet
		for _, text := range c.routes {
			routes = append(routes, *parseNetwork(text))
		}
		if got, err := freeAddresses(c.taken, routes); err != nil || got != c.want {
			t.Errorf("%s: %d, %v, want %d", what, got, err, c.want)
		}
	}
	if _, err := freeAddresses(all, nil); err == nil || !strings.Contains(err.Error(), "17 clusters") {
		t.Errorf("all are taken: %v", err)
	}
	if _, err := freeAddresses(nil, []net.IPNet{*parseNetwork("10.0.0.0/8")}); err == nil || !strings.Contains(err.Error(), "10.0.0.0/8") {
		t.Errorf("a route to all: %v", err)
	}
}
