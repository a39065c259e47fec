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

func (a addresses) onBridge(address string) *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(address), Mask: parseNetwork(a.nodeNetwork()).Mask}}
}

// makeBridge creates the bridge to which the nodes are connected.
func (l layout) makeBridge() error {
	name := l.addresses.bridge()
	link, err := findLink(netlink.LinkByName(name))
	if err != nil {
		return err
	}
	if link == nil {
		routes, err := machineRoutes()
		if err != nil {
			return err
		}
		if err := l.addresses.checkFree(routes); err != nil {
			return err
		}
		attributes := netlink.NewLinkAttrs()
		attributes.Name = name
		if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attributes}); err != nil {
			return fmt.Errorf("create bridge %s: %w", name, err)
		}
		if link, err = netlink.LinkByName(name); err != nil {
			return err
		}
	}
	if !l.ownsDevice(link.Attrs()) {
		return fmt.Errorf("the bridge %s belongs to another cluster: %s", name, link.Attrs().Alias)
	}
	if err := netlink.LinkSetAlias(link, l.marker()); err != nil {
		return fmt.Errorf("alias of %s: %w", name, err)
	}
	if err := netlink.AddrReplace(link, l.addresses.onBridge(l.addresses.host())); err != nil {
		return fmt.Errorf("address of %s: %w", name, err)
	}
	return netlink.LinkSetUp(link)
}

// machineRoutes returns the destinations of the machine's routes, except default routes.
func machineRoutes() ([]net.IPNet, error) {
	routes, err := list(func() ([]netlink.Route, error) { return netlink.RouteList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return nil, err
	}
	var found []net.IPNet
	for _, route := range routes {
		if route.Dst != nil && !route.Dst.IP.IsUnspecified() {
			found = append(found, *route.Dst)
		}
	}
	return found, nil
}

// list repeats an interrupted query, up to 100 attempts in total. Another cluster may change the
// network at the same time.
func list[T any](query func() ([]T, error)) ([]T, error) {
	var found []T
	var err error = netlink.ErrDumpInterrupted
	for attempt := 0; attempt < 100 && errors.Is(err, netlink.ErrDumpInterrupted); attempt++ {
		found, err = query()
	}
	return found, err
}

func findLink(link netlink.Link, err error) (netlink.Link, error) {
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, nil
	}
	return link, err
}

// linkNode connects a node's network namespace to the bridge.
func (l layout) linkNode(n node, pid int) error {
	bridge, err := netlink.LinkByName(l.addresses.bridge())
	if err != nil {
		return fmt.Errorf("bridge %s: %w", l.addresses.bridge(), err)
	}
	space, err := netns.GetFromPid(pid)
	if err != nil {
		return fmt.Errorf("network namespace of %s: %w", n.Name, err)
	}
	defer space.Close()
	device := l.addresses.device(n)
	// The device of an earlier boot may still exist, because the kernel removes devices only after a
	// delay.
	if err := removeLink(device); err != nil {
		return err
	}
	attributes := netlink.NewLinkAttrs()
	attributes.Name = device
	attributes.MasterIndex = bridge.Attrs().Index
	pair := &netlink.Veth{LinkAttrs: attributes, PeerName: "eth0", PeerNamespace: netlink.NsFd(space)}
	if err := netlink.LinkAdd(pair); err != nil {
		return fmt.Errorf("create %s: %w", device, err)
	}
	if err := netlink.LinkSetAlias(pair, l.marker()); err != nil {
		return fmt.Errorf("alias of %s: %w", device, err)
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
	if err := inside.AddrReplace(eth0, l.addresses.onBridge(l.addresses.node(n))); err != nil {
		return fmt.Errorf("address of %s: %w", n.Name, err)
	}
	return errors.Join(inside.LinkSetUp(loopback), inside.LinkSetUp(eth0))
}

// createRoutes creates the routes between the machine, the nodes and their pods. The machine
// reaches services through the first running node.
func (l layout) createRoutes(running map[string]process, nodes []node) error {
	bridge, err := netlink.LinkByName(l.addresses.bridge())
	if err != nil {
		return fmt.Errorf("bridge %s: %w", l.addresses.bridge(), err)
	}
	services := false
	for _, n := range nodes {
		holder, ok := running[n.Name]
		if !ok {
			continue
		}
		gateway := net.ParseIP(l.addresses.node(n))
		if err := netlink.RouteReplace(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: parseNetwork(l.addresses.pods(n)), Gw: gateway}); err != nil {
			return fmt.Errorf("route to the pods of %s: %w", n.Name, err)
		}
		if !services {
			services = true
			if err := netlink.RouteReplace(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: parseNetwork(l.addresses.serviceNetwork()), Gw: gateway}); err != nil {
				return fmt.Errorf("route to the services: %w", err)
			}
		}
		if err := l.addresses.routeInNode(n, holder.PID, nodes); err != nil {
			return fmt.Errorf("routes of %s: %w", n.Name, err)
		}
	}
	return nil
}

func (a addresses) routeInNode(n node, pid int, nodes []node) error {
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
	// A node has no default route, but needs a route to services: the kernel selects a route before
	// the packet filter translates the service's address.
	routes := []netlink.Route{{Dst: parseNetwork(a.serviceNetwork()), Scope: netlink.SCOPE_LINK, Src: net.ParseIP(a.node(n))}}
	for _, other := range nodes {
		if other.Name != n.Name {
			routes = append(routes, netlink.Route{Dst: parseNetwork(a.pods(other)), Gw: net.ParseIP(a.node(other))})
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

// links returns the names of the cluster's network devices.
func (l layout) links() ([]string, error) {
	links, err := list(netlink.LinkList)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, link := range links {
		if attributes := link.Attrs(); l.ownsDevice(attributes) {
			names = append(names, attributes.Name)
		}
	}
	return names, nil
}

// removeLinks removes the cluster's network devices. The kernel then removes the routes of these
// devices.
func (l layout) removeLinks(ctx context.Context) error {
	for {
		names, err := l.links()
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
