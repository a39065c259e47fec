package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
)

// addresses is the number of a cluster, from 0. The number determines the networks, addresses and
// network device names of the cluster, which clusters on one machine must not share. Nodes are
// connected to a bridge on the machine. The machine reaches pods and services through the nodes.
type addresses int

const (
	maxClusters = 17
	maxNodes    = 200

	apiPort  = 6443
	etcdPort = 23790
)

// second returns the second byte of all addresses in one of the cluster's three networks.
func (a addresses) second(network int) int { return 203 + 3*int(a) + network }

func (a addresses) nodeNetwork() string    { return fmt.Sprintf("10.%d.0.0/24", a.second(0)) }
func (a addresses) podNetwork() string     { return fmt.Sprintf("10.%d.0.0/16", a.second(1)) }
func (a addresses) serviceNetwork() string { return fmt.Sprintf("10.%d.0.0/24", a.second(2)) }

// networks returns all networks of the cluster.
func (a addresses) networks() []string {
	return []string{a.nodeNetwork(), a.podNetwork(), a.serviceNetwork()}
}

// host is the machine's address on the bridge.
func (a addresses) host() string { return fmt.Sprintf("10.%d.0.1", a.second(0)) }

// apiService is the first address of the service network, as Kubernetes requires.
func (a addresses) apiService() string { return fmt.Sprintf("10.%d.0.1", a.second(2)) }
func (a addresses) dnsService() string { return fmt.Sprintf("10.%d.0.10", a.second(2)) }

// loopback is the address at which the control plane's components, except the API server, listen
// for connections from the machine. All addresses in 127.0.0.0/8 belong to the machine.
func (a addresses) loopback() string { return fmt.Sprintf("127.0.0.%d", 1+int(a)) }

// node is the address of a node on the bridge.
func (a addresses) node(n node) string { return fmt.Sprintf("10.%d.0.%d", a.second(0), 10+n.Index) }

// pods is the network of a node's pods.
func (a addresses) pods(n node) string { return fmt.Sprintf("10.%d.%d.0/24", a.second(1), n.Index) }

// bridge is the name of the bridge on the machine.
func (a addresses) bridge() string { return "cleave-e2e" + a.suffix() }

// device is the name of the machine's end of the link to a node. The node's end of the link is
// eth0.
func (a addresses) device(n node) string { return fmt.Sprintf("ce2e%s-%d", a.suffix(), n.Index) }

func (a addresses) suffix() string {
	if a == 0 {
		return ""
	}
	return fmt.Sprintf("-c%d", a)
}

// contains reports whether an address or network of a firewall rule belongs to the cluster.
func (a addresses) contains(text string) bool {
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		address, err := netip.ParseAddr(text)
		if err != nil {
			return false
		}
		prefix = netip.PrefixFrom(address, address.BitLen())
	}
	return slices.ContainsFunc(a.networks(), func(network string) bool {
		whole := netip.MustParsePrefix(network)
		return whole.Contains(prefix.Addr()) && prefix.Bits() >= whole.Bits()
	})
}

// checkFree returns an error if a route of the machine overlaps a network of the cluster.
func (a addresses) checkFree(routes []net.IPNet) error {
	for _, route := range routes {
		for _, text := range a.networks() {
			network := parseNetwork(text)
			if network.Contains(route.IP) || route.Contains(network.IP) {
				return fmt.Errorf("the machine has a route to %s, which conflicts with the cluster's %s", &route, network)
			}
		}
	}
	return nil
}

// freeAddresses returns the lowest free number: no other cluster has the number, and the machine
// has no route to its networks.
func freeAddresses(taken []addresses, routes []net.IPNet) (addresses, error) {
	var conflicts []error
	for a := range addresses(maxClusters) {
		if slices.Contains(taken, a) {
			continue
		}
		err := a.checkFree(routes)
		if err == nil {
			return a, nil
		}
		conflicts = append(conflicts, err)
	}
	return 0, fmt.Errorf("no addresses are free for another cluster; %d clusters have some: %w", len(taken), errors.Join(conflicts...))
}

func parseNetwork(text string) *net.IPNet {
	_, network, err := net.ParseCIDR(text)
	if err != nil {
		panic(err) // a network that a test checks
	}
	return network
}
