package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// layoutVersion is the version of the state's format. Increase it when the launcher cannot use
// clusters of earlier launchers. The command up replaces a cluster with another version.
const layoutVersion = 1

// clusterState is the state of a cluster that the launcher stores.
type clusterState struct {
	Layout   int      `json:"layout"`
	Binaries binaries `json:"binaries"`
	Policies bool     `json:"policies,omitempty"`
	// Launchers that supported only one cluster did not store this field. Such a cluster has the
	// addresses of the first cluster.
	Addresses addresses `json:"addresses,omitempty"`
}

// cluster is a local cluster. Its methods implement the launcher's commands.
type cluster struct {
	layout   layout
	progress *progress
	built    binaries
}

// lock prevents other commands from changing the cluster. If the cluster no longer exists,
// unlocking also removes the lock file.
func (c *cluster) lock(ctx context.Context) (func(), error) {
	path := c.layout.lockPath()
	unlock, err := lockFile(ctx, path, func() { c.progress.printf("waiting for another command on this cluster") })
	if err != nil {
		return nil, err
	}
	return func() {
		if _, err := os.Stat(c.layout.dir); errors.Is(err, fs.ErrNotExist) {
			_ = os.Remove(path)
			_ = os.Remove(defaultStateDir) // fails while it contains other clusters
		}
		unlock()
	}, nil
}

func (c *cluster) mustExist() error {
	if _, err := os.Stat(c.layout.stateFile()); err != nil {
		return fmt.Errorf("there is no cluster %q (no %s); `cluster up` creates one", c.layout.name, c.layout.stateFile())
	}
	return nil
}

// component parses a component's name. It returns an error if the cluster does not exist.
func (c *cluster) component(text string) (component, error) {
	if err := c.mustExist(); err != nil {
		return component{}, err
	}
	nodes, err := c.layout.nodes()
	if err != nil {
		return component{}, err
	}
	return parseComponent(text, nodes)
}

// process returns a component's process, and whether the process runs.
func (c *cluster) process(one component) (process, bool, error) {
	p, err := readJSON[process](c.layout.processFile(one))
	if errors.Is(err, fs.ErrNotExist) {
		return process{}, false, nil
	} else if err != nil {
		return process{}, false, err
	}
	return p, p.isRunning(), nil
}

// nodeProcess returns PID 1 of a running node.
func (c *cluster) nodeProcess(name string) (process, error) {
	one, err := c.component(kindNode + "@" + name)
	if err != nil {
		return process{}, err
	}
	p, alive, err := c.process(one)
	if err != nil {
		return process{}, err
	}
	if !alive {
		return process{}, fmt.Errorf("node %s is down; `cluster start node@%s` boots it", name, name)
	}
	return p, nil
}

// upOptions are the settings of a cluster.
type upOptions struct {
	driverRoot string
	// How containerd uses NVIDIA's runtime: toolkitDefault or toolkitClass, or "" without the toolkit.
	toolkit string
	// Seconds between status reports of each node's kubelet, by node name.
	status map[string]int
	// Whether NetworkPolicies are enforced.
	policies bool
}

// up starts, repairs or extends the cluster, and waits until it has at least count nodes and all
// nodes are Ready.
func (c *cluster) up(ctx context.Context, count int, options upOptions) error {
	built, err := buildAll(ctx, options.toolkit != "", c.progress)
	if err != nil {
		return err
	}
	c.built = built
	state, err := readJSON[clusterState](c.layout.stateFile())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// No cluster exists, but files of an interrupted up or down may remain.
		if err := c.sweep(ctx); err != nil {
			return err
		}
	case err != nil:
		return fmt.Errorf("%w (`cluster down` removes the cluster)", err)
	case state.Layout != layoutVersion || state.Binaries.fingerprint() != built.fingerprint():
		c.progress.printf("replacing the cluster, which has another version")
		if err := c.sweep(ctx); err != nil {
			return err
		}
	}
	if err := c.prepare(ctx, options.policies); err != nil {
		return err
	}
	nodes, err := c.layout.nodes()
	if err != nil {
		return err
	}
	for i := range nodes {
		want := nodes[i]
		want.DriverRoot, want.Toolkit, want.StatusSeconds = options.driverRoot, options.toolkit, options.status[want.Name]
		if want != nodes[i] {
			c.progress.printf("rebooting %s with new settings", want.Name)
			if err := c.stop(ctx, component{kindNode, want.Name}, unix.SIGKILL); err != nil {
				return err
			}
			nodes[i] = want
			if err := writeJSON(c.layout.nodeFile(nodes[i].Name), nodes[i]); err != nil {
				return err
			}
		}
	}
	for number := 1; len(nodes) < count; number++ {
		name := fmt.Sprintf("node%d", number)
		n := node{Name: name, DriverRoot: options.driverRoot, Toolkit: options.toolkit, StatusSeconds: options.status[name]}
		if _, err := os.Stat(c.layout.nodeFile(n.Name)); err == nil {
			continue
		}
		if n.Index, err = freeIndex(nodes); err != nil {
			return err
		}
		if err := writeJSON(c.layout.nodeFile(n.Name), n); err != nil {
			return err
		}
		nodes = append(nodes, n)
	}
	for name := range options.status {
		if !slices.ContainsFunc(nodes, func(n node) bool { return n.Name == name }) {
			return fmt.Errorf("--node-status: there is no node %q", name)
		}
	}
	if err := c.startAll(ctx, nodes, options.policies); err != nil {
		return err
	}
	c.progress.printf("ready; for kubectl and helm: eval \"$(%s env)\"", filepath.Join(c.layout.binDir(), "cluster"))
	return nil
}

// prepare creates the directories, addresses, credentials, programs, image and cgroup that
// components need before they start.
func (c *cluster) prepare(ctx context.Context, policies bool) error {
	for _, dir := range []string{"logs", "run", "bin", "etcd", "helm"} {
		if err := os.MkdirAll(filepath.Join(c.layout.dir, dir), 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(filepath.Join(c.layout.dir, "etcd"), 0o700); err != nil {
		return err
	}
	if err := c.claimAddresses(ctx, policies); err != nil {
		return err
	}
	if err := c.layout.makeCredentials(); err != nil {
		return fmt.Errorf("create certificates: %w", err)
	}
	if err := c.makePrograms(); err != nil {
		return err
	}
	if _, err := buildImage(imageSpec{
		Tag: pauseImage, Base: "none", Entrypoint: []string{"/pause"}, Add: []string{c.built["pause"] + "/pause:/pause:0755"},
	}, c.storedImage(pauseImage)); err != nil {
		return err
	}
	if err := makeCgroup(c.layout.cgroup("")); err != nil {
		return fmt.Errorf("create cgroup: %w", err)
	}
	return nil
}

// makePrograms writes links and scripts into the directory that cluster env adds to PATH.
func (c *cluster) makePrograms() error {
	launcher, err := os.Executable()
	if err != nil {
		return err
	}
	quoted := []string{shellQuote(launcher), "--name", c.layout.name, "--state", shellQuote(c.layout.dir)}
	this := strings.Join(quoted, " ")
	var environment strings.Builder
	for _, name := range []string{sourceVariable, programsVariable, versionVariable} {
		if value := os.Getenv(name); value != "" {
			fmt.Fprintf(&environment, "export %s=%s\n", name, shellQuote(value))
		}
	}
	for name, script := range map[string]string{
		"cluster": fmt.Sprintf("#!/bin/sh\n%sexec %s \"$@\"\n", &environment, this),
		// This script runs ctr on the first node, or on the node in CTR_NODE.
		"ctr": fmt.Sprintf("#!/bin/sh\nexec %s exec-node \"${CTR_NODE:-node1}\" ctr \"$@\"\n", this),
	} {
		if err := writeFile(filepath.Join(c.layout.binDir(), name), []byte(script), 0o755); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{"kubectl": c.built["kube"] + "/kubectl", "helm": c.built["helm"] + "/helm"} {
		path := filepath.Join(c.layout.binDir(), name)
		if current, err := os.Readlink(path); err == nil && current == target {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.Symlink(target, path); err != nil {
			return err
		}
	}
	return nil
}

// startAll starts the components that are not running, and waits until all nodes are Ready. The
// nodes boot while the control plane starts.
func (c *cluster) startAll(ctx context.Context, nodes []node, policies bool) error {
	group, groupCtx := errgroup.WithContext(ctx)
	apiReady := make(chan struct{})
	group.Go(func() error {
		for _, kind := range []string{kindEtcd, kindAPIServer} {
			if err := c.ensure(groupCtx, component{kind: kind}); err != nil {
				return err
			}
		}
		close(apiReady)
		if err := c.ensure(groupCtx, component{kind: kindControllerManager}); err != nil {
			return err
		}
		if err := c.ensure(groupCtx, component{kind: kindScheduler}); err != nil || !policies {
			return err
		}
		return c.ensure(groupCtx, component{kind: kindPolicies})
	})
	group.Go(func() error {
		if err := c.bootNodes(groupCtx, nodes); err != nil {
			return err
		}
		select {
		case <-groupCtx.Done():
			return groupCtx.Err()
		case <-apiReady:
		}
		return c.joinNodes(groupCtx, nodes)
	})
	if err := group.Wait(); err != nil {
		return err
	}
	api, err := newAPI(c.layout)
	if err != nil {
		return err
	}
	return api.prepareCluster(ctx, c.layout.addresses.dnsService())
}

// bootNodes boots the nodes, starts containerd on each node, and imports the stored images.
func (c *cluster) bootNodes(ctx context.Context, nodes []node) error {
	group, groupCtx := errgroup.WithContext(ctx)
	for _, n := range nodes {
		group.Go(func() error {
			if err := c.ensure(groupCtx, component{kindNode, n.Name}); err != nil {
				return err
			}
			if err := c.ensure(groupCtx, component{kindContainerd, n.Name}); err != nil {
				return err
			}
			return c.importStored(groupCtx, n.Name)
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return c.routeAll()
}

// joinNodes starts the kubelet and the proxy of each node, and waits until the nodes are Ready.
func (c *cluster) joinNodes(ctx context.Context, nodes []node) error {
	api, err := newAPI(c.layout)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, n := range nodes {
		group.Go(func() error {
			// Start the kubelet first, because the proxy waits for the Node object that the kubelet creates.
			for _, kind := range []string{kindKubelet, kindProxy} {
				if err := c.ensure(ctx, component{kind, n.Name}); err != nil {
					return err
				}
			}
			if err := api.waitNodeReady(ctx, n.Name); err != nil {
				return fmt.Errorf("%w\nthe end of its log:\n%s", err, tailFile(c.layout.logFile(component{kindKubelet, n.Name}), 15))
			}
			c.progress.printf("%s is Ready", n.Name)
			return nil
		})
	}
	return group.Wait()
}

func (c *cluster) routeAll() error {
	nodes, err := c.layout.nodes()
	if err != nil {
		return err
	}
	running := make(map[string]process)
	for _, n := range nodes {
		p, alive, err := c.process(component{kindNode, n.Name})
		if err != nil {
			return err
		}
		if alive {
			running[n.Name] = p
		}
	}
	return c.layout.createRoutes(running, nodes)
}

// ensure starts a component if it is not running, and waits until it serves.
func (c *cluster) ensure(ctx context.Context, one component) error {
	p, alive, err := c.process(one)
	if err != nil {
		return err
	}
	if !alive {
		if one.kind == kindNode {
			err = c.bootNode(ctx, one.node)
		} else {
			err = c.spawn(ctx, one)
		}
		if err != nil {
			return err
		}
		if p, _, err = c.process(one); err != nil {
			return err
		}
	}
	if err := c.waitUntilServing(ctx, one, p); err != nil {
		return fmt.Errorf("%w\nthe end of its log, %s:\n%s", err, c.layout.logFile(one), tailFile(c.layout.logFile(one), 15))
	}
	if !alive {
		c.progress.printf("%s serves, process %d", one, p.PID)
	}
	return nil
}

// Makes the garbage collector of the control plane run less often. The control plane of a test
// cluster has a small heap, and memory is less scarce than processor time.
const lazyGarbageCollector = "GOGC=400"

// spawn starts a component other than a node.
func (c *cluster) spawn(ctx context.Context, one component) error {
	spec := spawnSpec{
		Argv: c.layout.argv(one, c.built), Log: c.layout.logFile(one), ProcessFile: c.layout.processFile(one),
		Cgroup: c.layout.cgroup(""), Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", lazyGarbageCollector, c.layout.marker()},
	}
	if one.node != "" {
		holder, err := c.nodeProcess(one.node)
		if err != nil {
			return err
		}
		spec.Node, spec.Env = holder.PID, c.layout.nodeEnv()
		spec.Cgroup = c.layout.cgroup(one.node) + nodeLeaf()
	}
	return spec.start(ctx)
}

// bootNode starts a node's first process in new namespaces.
func (c *cluster) bootNode(ctx context.Context, name string) error {
	n, err := readJSON[node](c.layout.nodeFile(name))
	if err != nil {
		return err
	}
	cni, err := cniDir()
	if err != nil {
		return err
	}
	// Clear these directories at each boot.
	for _, dir := range []string{"/run", "/tmp"} {
		if err := os.RemoveAll(c.layout.inNode(name, dir)); err != nil {
			return err
		}
	}
	for path, value := range map[string]object{
		"/etc/kubernetes/kubelet.json":    kubeletConfig(c.layout.addresses, n),
		"/etc/kubernetes/kube-proxy.json": proxyConfig(c.layout.addresses, n),
		"/etc/cni/net.d/10-pods.conflist": networkConfig(c.layout.addresses, n),
	} {
		if err := writeJSON(c.layout.inNode(name, path), value); err != nil {
			return err
		}
	}
	if err := writeFile(c.layout.inNode(name, "/etc/containerd/config.toml"), []byte(containerdConfig+toolkitConfig(n.Toolkit)), 0o644); err != nil {
		return err
	}
	if err := c.layout.makeNodeCredentials(n); err != nil {
		return err
	}
	// Remove stale cgroups, because for each of them the kubelet spends seconds searching for a
	// container.
	if err := removeCgroup(c.layout.cgroup(name), time.Now().Add(10*time.Second)); err != nil {
		return fmt.Errorf("remove the cgroups of the previous boot: %w", err)
	}
	if err := makeCgroup(c.layout.cgroup(name) + nodeLeaf()); err != nil {
		return fmt.Errorf("create cgroup: %w", err)
	}
	additions := ""
	if n.Toolkit != "" {
		additions = filepath.Join(c.layout.nodeDir(name), "usr-additions")
		if err := installToolkit(additions, n.DriverRoot, c.built[toolkitUnit.name]); err != nil {
			return fmt.Errorf("install the driver and the toolkit: %w", err)
		}
	}
	spec, err := json.Marshal(nodeInitSpec{
		Node: name, Address: c.layout.addresses.node(n), Root: c.layout.nodeRoot(name), Cgroup: c.layout.cgroup(name),
		Kube: c.built["kube"], Containerd: c.built["containerd"], CNI: cni, DriverRoot: n.DriverRoot, UsrAdditions: additions,
	})
	if err != nil {
		return err
	}
	log, err := os.OpenFile(c.layout.logFile(component{kindNode, name}), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	ready, readyWriter, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	// The node outlives ctx.
	command, err := selfCommand(context.WithoutCancel(ctx), commandNodeInit)
	if err != nil {
		return err
	}
	command.Stdin, command.Stdout, command.Stderr = bytes.NewReader(spec), log, log
	command.Env, command.Dir = c.layout.nodeEnv(), "/"
	command.ExtraFiles = []*os.File{readyWriter} // readyDescriptor
	command.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
	}
	err = command.Start()
	readyWriter.Close()
	if err != nil {
		return fmt.Errorf("create the namespaces of %s: %w", name, err)
	}
	started, err := identify(command.Process.Pid)
	if err == nil {
		err = writeJSON(c.layout.processFile(component{kindNode, name}), started)
	}
	if err == nil {
		// An empty answer means that the node failed to boot. The node's log has the reason.
		answer, readErr := io.ReadAll(ready)
		if readErr != nil || string(answer) != "ready" {
			err = fmt.Errorf("%s does not boot: %s", name, tailFile(log.Name(), 3))
		}
	}
	if err == nil {
		err = c.layout.linkNode(n, command.Process.Pid)
	}
	if err != nil {
		_ = command.Process.Kill()
		_ = command.Wait()
		return err
	}
	return nil
}

// cniDir returns the directory of CNI plugins: that of the prebuilt programs, or of the machine.
func cniDir() (string, error) {
	dirs := []string{"/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"}
	if given := os.Getenv(programsVariable); given != "" {
		dirs = append([]string{filepath.Join(given, "cni")}, dirs...)
	}
	for _, dir := range dirs {
		if _, err := os.Stat(filepath.Join(dir, "ptp")); err == nil {
			return dir, nil
		}
	}
	return "", errors.New("the CNI plugin ptp is not installed (Debian: containernetworking-plugins)")
}

// startAlone starts one component, or a node with all its components. The commands start, restart
// and node add use startAlone.
func (c *cluster) startAlone(ctx context.Context, one component) error {
	state, err := readJSON[clusterState](c.layout.stateFile())
	if err != nil {
		return err
	}
	c.built = state.Binaries
	if one.kind != kindNode {
		return c.ensure(ctx, one)
	}
	n, err := readJSON[node](c.layout.nodeFile(one.node))
	if err != nil {
		return err
	}
	if err := c.bootNodes(ctx, []node{n}); err != nil {
		return err
	}
	return c.joinNodes(ctx, []node{n})
}

// Timeouts for a component's stop and start.
const (
	stopTimeout  = 90 * time.Second
	serveTimeout = 120 * time.Second
)

// stop sends a terminating signal to a component, and waits until the component has exited.
func (c *cluster) stop(ctx context.Context, one component, number unix.Signal) error {
	if one.kind == kindNode && number == unix.SIGTERM {
		// Stop the upper layers first, as a shutdown does.
		for _, kind := range []string{kindKubelet, kindProxy, kindContainerd} {
			if err := c.stop(ctx, component{kind, one.node}, unix.SIGTERM); err != nil {
				return err
			}
		}
		number = unix.SIGKILL // PID 1 ignores all other signals
	}
	p, alive, err := c.process(one)
	if err != nil || !alive {
		return err
	}
	if err := p.signal(number); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if err := p.waitUntilExited(ctx); err != nil {
		return fmt.Errorf("%w (`cluster kill %s` stops it with SIGKILL)", err, one)
	}
	c.progress.printf("%s stopped, process %d", one, p.PID)
	return nil
}

// status prints the components. It fails if a component is not running.
func (c *cluster) status(out io.Writer) error {
	if err := c.mustExist(); err != nil {
		return err
	}
	nodes, err := c.layout.nodes()
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "COMPONENT\tSTATE\tPID\tLOG")
	failed := false
	state, err := readJSON[clusterState](c.layout.stateFile())
	if err != nil {
		return err
	}
	for _, one := range components(nodes, state.Policies) {
		p, alive, err := c.process(one)
		if err != nil {
			return err
		}
		state, pid := "running", fmt.Sprint(p.PID)
		if !alive {
			state, pid, failed = "stopped", "-", true
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\n", one, state, pid, c.layout.logFile(one))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if failed {
		return exitCode(1)
	}
	return nil
}

// addNode adds a node to a running cluster, or starts an existing node.
func (c *cluster) addNode(ctx context.Context, name, driverRoot string) error {
	if err := c.mustExist(); err != nil {
		return err
	}
	if !validName.MatchString(name) {
		return fmt.Errorf("node name %q: 1 to 32 of a-z, 0-9 and -, not at the ends", name)
	}
	n, err := readJSON[node](c.layout.nodeFile(name))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		nodes, err := c.layout.nodes()
		if err != nil {
			return err
		}
		index, err := freeIndex(nodes)
		if err != nil {
			return err
		}
		n = node{Name: name, Index: index, DriverRoot: driverRoot}
		// A directory without a node file belonged to a removed node.
		if err := os.RemoveAll(c.layout.nodeDir(name)); err != nil {
			return err
		}
		if err := writeJSON(c.layout.nodeFile(name), n); err != nil {
			return err
		}
	case err != nil:
		return err
	case n.DriverRoot != driverRoot:
		return fmt.Errorf("node %s has driver root %q; remove the node to change it", name, n.DriverRoot)
	}
	return c.startAlone(ctx, component{kindNode, name})
}

// removeNode stops and removes a node.
func (c *cluster) removeNode(ctx context.Context, name string) error {
	if _, err := c.component(kindNode + "@" + name); err != nil {
		return err
	}
	n, err := readJSON[node](c.layout.nodeFile(name))
	if err != nil {
		return err
	}
	if err := c.stop(ctx, component{kindNode, name}, unix.SIGKILL); err != nil {
		return err
	}
	if err := removeLink(c.layout.addresses.device(n)); err != nil {
		return err
	}
	if err := removeCgroup(c.layout.cgroup(name), time.Now().Add(10*time.Second)); err != nil {
		return err
	}
	api, err := newAPI(c.layout)
	if err != nil {
		return err
	}
	if err := api.deleteNode(ctx, name); err != nil {
		return fmt.Errorf("remove the Node object: %w", err)
	}
	for _, kind := range nodeKinds {
		if err := os.Remove(c.layout.processFile(component{kind, name})); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	// Remove this file before the directory, because a node without this file no longer exists.
	if err := os.Remove(c.layout.nodeFile(name)); err != nil {
		return err
	}
	if err := os.RemoveAll(c.layout.nodeDir(name)); err != nil {
		return err
	}
	return c.routeAll()
}

// importImage imports an archive into the node with this name. If the name is "all", it imports the
// archive into all current and future nodes.
func (c *cluster) importImage(ctx context.Context, file, name string) error {
	if err := c.mustExist(); err != nil {
		return err
	}
	tag, err := imageTag(file)
	if err != nil {
		return err
	}
	targets := []string{name}
	if name == "all" {
		nodes, err := c.layout.nodes()
		if err != nil {
			return err
		}
		targets = nil
		for _, n := range nodes {
			targets = append(targets, n.Name)
		}
		if err := copyFile(file, c.storedImage(tag), 0o644); err != nil {
			return err
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, target := range targets {
		group.Go(func() error { return c.importInto(ctx, target, file, tag) })
	}
	return group.Wait()
}

// storedImage returns the path at which the archive of a tag is stored for future nodes.
func (c *cluster) storedImage(tag string) string {
	return filepath.Join(c.layout.imagesDir(), strings.NewReplacer("/", "_", ":", "__").Replace(tag)+".tar")
}

func (c *cluster) importInto(ctx context.Context, name, file, tag string) error {
	input, err := os.Open(file)
	if err != nil {
		return err
	}
	defer input.Close()
	command, err := c.onNode(ctx, name, "ctr", "images", "import", "--local=false", "-")
	if err != nil {
		return err
	}
	command.Stdin = input
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("import into %s: %w: %s", name, err, bytes.TrimSpace(output))
	}
	c.progress.printf("%s has %s", name, tag)
	return nil
}

// importStored imports the stored images that a node lacks.
func (c *cluster) importStored(ctx context.Context, name string) error {
	command, err := c.onNode(ctx, name, "ctr", "images", "list", "--quiet")
	if err != nil {
		return err
	}
	output, err := command.Output()
	if err != nil {
		return fmt.Errorf("list the images of %s: %w", name, err)
	}
	present := strings.Fields(string(output))
	files, err := filepath.Glob(filepath.Join(c.layout.imagesDir(), "*.tar"))
	if err != nil {
		return err
	}
next:
	for _, file := range files {
		tag, err := imageTag(file)
		if err != nil {
			return err
		}
		for _, other := range present {
			if other == tag {
				continue next
			}
		}
		if err := c.importInto(ctx, name, file, tag); err != nil {
			return err
		}
	}
	return nil
}

// onNode returns a command that runs on a node.
func (c *cluster) onNode(ctx context.Context, name string, argv ...string) (*exec.Cmd, error) {
	command, err := selfCommand(ctx, append([]string{"--name", c.layout.name, "--state", c.layout.dir, commandExecNode, name}, argv...)...)
	if err != nil {
		return nil, err
	}
	// Send SIGTERM instead of SIGKILL, because SIGTERM can be forwarded to the command.
	command.Cancel = func() error { return command.Process.Signal(syscall.SIGTERM) }
	command.WaitDelay = 10 * time.Second
	return command, nil
}

func tailFile(path string, lines int) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(content)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
