package main

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
)

// claimAddresses selects addresses that no other cluster has, stores the cluster's state, and
// creates its bridge. An existing cluster keeps its addresses.
func (c *cluster) claimAddresses(ctx context.Context, policies bool) error {
	unlock, err := lockClaims(ctx, defaultStateDir, func() { c.progress.printf("waiting for another cluster to start") })
	if err != nil {
		return err
	}
	defer unlock()
	state, err := readJSON[clusterState](c.layout.stateFile())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		taken, err := storedAddresses(defaultStateDir)
		if err != nil {
			return err
		}
		routes, err := machineRoutes()
		if err != nil {
			return err
		}
		if c.layout.addresses, err = freeAddresses(taken, routes); err != nil {
			return err
		}
	case err != nil:
		return err
	default:
		c.layout.addresses = state.Addresses
	}
	c.layout.claimed = true
	state = clusterState{Layout: layoutVersion, Binaries: c.built, Policies: policies, Addresses: c.layout.addresses}
	if err := writeJSON(c.layout.stateFile(), state); err != nil {
		return err
	}
	// Create the bridge now: other launchers detect a cluster outside the default directory only by
	// the routes of its bridge.
	return c.layout.makeBridge()
}

// lockClaims prevents two clusters from claiming the same addresses. Unlocking removes the lock
// file. The name of the lock file is not a valid cluster name.
func lockClaims(ctx context.Context, dir string, waiting func()) (func(), error) {
	path := filepath.Join(dir, ".addresses.lock")
	unlock, err := lockFile(ctx, path, waiting)
	if err != nil {
		return nil, err
	}
	return func() {
		_ = os.Remove(path)
		unlock()
	}, nil
}

// storedAddresses returns the addresses of all clusters below dir, including stopped clusters. It
// reads only the field Addresses, so it can also read the state of launchers with another layout.
func storedAddresses(dir string) ([]addresses, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*", stateFileName))
	if err != nil {
		return nil, err
	}
	var taken []addresses
	for _, file := range files {
		content, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // the cluster has just been removed
		} else if err != nil {
			return nil, err
		}
		var state clusterState
		if json.Unmarshal(content, &state) == nil {
			taken = append(taken, state.Addresses)
		}
	}
	return taken, nil
}

// loadAddresses reads the addresses of an existing cluster. If no cluster exists, the layout keeps
// the addresses of the first cluster.
func (c *cluster) loadAddresses() {
	if state, err := readJSON[clusterState](c.layout.stateFile()); err == nil {
		c.layout.addresses, c.layout.claimed = state.Addresses, true
	}
}

// ownsDevice reports whether a network device of the machine belongs to this cluster. Just after a
// device is created, its owner's marker becomes its alias. Without an alias, the device's name
// identifies the owner. A cluster that has not claimed addresses owns no device. Its layout has the
// addresses of the first cluster, which another command may be starting.
func (l layout) ownsDevice(device *netlink.LinkAttrs) bool {
	if device.Alias != "" {
		return device.Alias == l.marker()
	}
	if !l.claimed {
		return false
	}
	if device.Name == l.addresses.bridge() {
		return true
	}
	for index := 1; index <= maxNodes; index++ {
		if device.Name == l.addresses.device(node{Index: index}) {
			return true
		}
	}
	return false
}
