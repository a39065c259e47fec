package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

func parseNetwork(text string) *net.IPNet {
	_, network, err := net.ParseCIDR(text)
	if err != nil {
		panic(err) // a constant that a test checks
	}
	return network
}

func hostNetwork(address string) *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(address), Mask: parseNetwork(nodeNetwork).Mask}}
}

// makeBridge creates the bridge of the nodes.
func (l layout) makeBridge() error {
	link, err := findLink(netlink.LinkByName(l.bridge()))
	if err != nil {
		return err
	}
	if link == nil {
		if err := checkNetworksAreFree(); err != nil {
			return err
		}
		attributes := netlink.NewLinkAttrs()
		attributes.Name = l.bridge()
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attributes}); err != nil {
			return fmt.Errorf("create bridge %s: %w", l.bridge(), err)
		}
		if link, err = netlink.LinkByName(l.bridge()); err != nil {
			return err
		}
	}
	if err := netlink.AddrReplace(link, hostNetwork(hostAddress)); err != nil {
		return fmt.Errorf("address of %s: %w", l.bridge(), err)
	}
	return netlink.LinkSetUp(link)
}

// checkNetworksAreFree refuses networks to which the machine already has routes.
func checkNetworksAreFree() error {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return err
	}
	for _, route := range routes {
		if route.Dst == nil || route.Dst.IP.IsUnspecified() {
			continue
		}
		for _, text := range []string{nodeNetwork, podNetwork, serviceNetwork} {
			network := parseNetwork(text)
			if network.Contains(route.Dst.IP) || route.Dst.Contains(network.IP) {
				return fmt.Errorf("the machine has a route to %s, which conflicts with the cluster's %s", route.Dst, network)
			}
		}
	}
	return nil
}

func findLink(link netlink.Link, err error) (netlink.Link, error) {
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	return link, err
}

// linkNode connects a node's network namespace to the bridge.
func (l layout) linkNode(n node, pid int) error {
	bridge, err := netlink.LinkByName(l.bridge())
	if err != nil {
		return fmt.Errorf("bridge %s: %w", l.bridge(), err)
	}
	space, err := netns.GetFromPid(pid)
	if err != nil {
		return fmt.Errorf("network namespace of %s: %w", n.Name, err)
	}
	defer space.Close()
	// The kernel removes the device of an earlier boot only after a delay, so it may still exist.
	if err := removeLink(n.device()); err != nil {
		return err
	}
	attributes := netlink.NewLinkAttrs()
	attributes.Name = n.device()
	attributes.MasterIndex = bridge.Attrs().Index
	pair := &netlink.Veth{LinkAttrs: attributes, PeerName: "eth0", PeerNamespace: netlink.NsFd(space)}
	if err := netlink.LinkAdd(pair); err != nil {
		return fmt.Errorf("create %s: %w", n.device(), err)
	}
	if err := netlink.LinkSetUp(pair); err != nil {
		return err
	}
	inside, err := netlink.NewHandleAt(space, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer inside.Close()
	loopback, err := inside.LinkByName("lo")
	if err != nil {
		return err
	}
	eth0, err := inside.LinkByName("eth0")
	if err != nil {
		return err
	}
	if err := inside.AddrReplace(eth0, hostNetwork(n.address())); err != nil {
		return fmt.Errorf("address of %s: %w", n.Name, err)
	}
	return errors.Join(inside.LinkSetUp(loopback), inside.LinkSetUp(eth0))
}

// createRoutes creates the routes between the machine, the nodes and their pods. The machine
// reaches services through the first node.
func (l layout) createRoutes(running map[string]process, nodes []node) error {
	bridge, err := netlink.LinkByName(l.bridge())
	if err != nil {
		return fmt.Errorf("bridge %s: %w", l.bridge(), err)
	}
	services := false
	for _, n := range nodes {
		holder, ok := running[n.Name]
		if !ok {
			continue
		}
		gateway := net.ParseIP(n.address())
		if err := netlink.RouteReplace(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: parseNetwork(n.podRange()), Gw: gateway}); err != nil {
			return fmt.Errorf("route to the pods of %s: %w", n.Name, err)
		}
		if !services {
			services = true
			if err := netlink.RouteReplace(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: parseNetwork(serviceNetwork), Gw: gateway}); err != nil {
				return fmt.Errorf("route to the services: %w", err)
			}
		}
		if err := routeInNode(n, holder.PID, nodes); err != nil {
			return fmt.Errorf("routes of %s: %w", n.Name, err)
		}
	}
	return nil
}

func routeInNode(n node, pid int, nodes []node) error {
	space, err := netns.GetFromPid(pid)
	if err != nil {
		return err
	}
	defer space.Close()
	inside, err := netlink.NewHandleAt(space, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer inside.Close()
	eth0, err := inside.LinkByName("eth0")
	if err != nil {
		return err
	}
	// A node has no default route, but its programs need a route to services before the packet filter
	// translates their addresses.
	routes := []netlink.Route{{Dst: parseNetwork(serviceNetwork), Scope: netlink.SCOPE_LINK, Src: net.ParseIP(n.address())}}
	for _, other := range nodes {
		if other.Name != n.Name {
			routes = append(routes, netlink.Route{Dst: parseNetwork(other.podRange()), Gw: net.ParseIP(other.address())})
		}
	}
	for _, route := range routes {
		route.LinkIndex = eth0.Attrs().Index
		if err := inside.RouteReplace(&route); err != nil {
			return fmt.Errorf("%s: %w", route.Dst, err)
		}
	}
	return nil
}

func removeLink(name string) error {
	link, err := findLink(netlink.LinkByName(name))
	if err != nil || link == nil {
		return err
	}
	if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove device %s: %w", name, err)
	}
	return nil
}

// clusterLinks returns the names of a cluster's network devices.
func (l layout) clusterLinks() ([]string, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, link := range links {
		if name := link.Attrs().Name; name == l.bridge() || strings.HasPrefix(name, "ce2e-") {
			names = append(names, name)
		}
	}
	return names, nil
}

// removeLinks removes all network devices. Their routes disappear with them.
func (c *cluster) removeLinks(ctx context.Context) error {
	for {
		names, err := c.links()
		if err != nil || len(names) == 0 {
			return err
		}
		for _, name := range names {
			if err := removeLink(name); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("network devices %s still exist: %w", strings.Join(names, ", "), ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}
