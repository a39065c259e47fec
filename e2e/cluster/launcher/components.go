package main

import (
	"fmt"
	"slices"
	"strings"
)

// The kinds of components. The control plane's components run once, directly on the machine. The
// node components run on each node.
const (
	kindEtcd              = "etcd"
	kindAPIServer         = "apiserver"
	kindControllerManager = "controller-manager"
	kindScheduler         = "scheduler"
	kindPolicies          = "policies" // if NetworkPolicies are enforced
	kindNode              = "node"     // PID 1 of the node's namespaces: killing it is a power cut
	kindContainerd        = "containerd"
	kindKubelet           = "kubelet"
	kindProxy             = "proxy"
)

// The kinds of components in start order.
var (
	controlPlaneKinds = []string{kindEtcd, kindAPIServer, kindControllerManager, kindScheduler}
	nodeKinds         = []string{kindNode, kindContainerd, kindKubelet, kindProxy}
)

var componentHelp = fmt.Sprintf(`COMPONENT is %s, or on a node %s.
With several nodes, add the name: kubelet@node1. Killing node@NAME is a power cut of
the node. Starting it boots the node with an unchanged disk.`,
	strings.Join(controlPlaneKinds, ", "), strings.Join(nodeKinds, ", "))

// component identifies a component of the cluster.
type component struct {
	kind string
	node string // "" in the control plane
}

func (c component) String() string {
	if c.node == "" {
		return c.kind
	}
	return c.kind + "@" + c.node
}

// parseComponent parses a component's name in a cluster with these nodes.
func parseComponent(text string, nodes []node) (component, error) {
	kind, name, named := strings.Cut(text, "@")
	for _, known := range append(slices.Clone(controlPlaneKinds), kindPolicies) {
		if kind == known || kind == "kube-"+known {
			if named {
				return component{}, fmt.Errorf("%s runs once, not on a node", known)
			}
			return component{kind: known}, nil
		}
	}
	for _, known := range nodeKinds {
		if kind != known && kind != "kube-"+known {
			continue
		}
		if !named {
			if len(nodes) != 1 {
				return component{}, fmt.Errorf("there are %d nodes: add the node's name, as in %s@node1", len(nodes), known)
			}
			return component{known, nodes[0].Name}, nil
		}
		for _, n := range nodes {
			if n.Name == name {
				return component{known, n.Name}, nil
			}
		}
		return component{}, fmt.Errorf("there is no node %q", name)
	}
	return component{}, fmt.Errorf("unknown component %q; there are %s, and on a node %s",
		text, strings.Join(controlPlaneKinds, ", "), strings.Join(nodeKinds, ", "))
}

// components returns all components of the cluster in start order.
func components(nodes []node, policies bool) []component {
	var all []component
	for _, kind := range controlPlaneKinds {
		all = append(all, component{kind: kind})
	}
	if policies {
		all = append(all, component{kind: kindPolicies})
	}
	for _, n := range nodes {
		for _, kind := range nodeKinds {
			all = append(all, component{kind, n.Name})
		}
	}
	return all
}

// argv returns a component's command line. The paths are paths on the machine for the control
// plane, and paths on the node for node components.
func (l layout) argv(c component, built binaries) []string {
	kube := func(name string) string { return built["kube"] + "/" + name }
	switch c.kind {
	case kindEtcd:
		url := fmt.Sprintf("http://%s:%d", l.addresses.loopback(), etcdPort)
		return []string{
			kube("etcd"), "--name=" + l.name, "--data-dir=" + l.dir + "/etcd",
			"--listen-client-urls=" + url, "--advertise-client-urls=" + url,
			// Any port works, because etcd has no peers.
			"--listen-peer-urls=http://" + l.addresses.loopback() + ":0",
			// Do not sync to the disk, because the data is not needed after a power failure.
			"--unsafe-no-fsync",
			"--log-level=warn",
		}
	case kindAPIServer:
		return []string{
			kube("kube-apiserver"),
			fmt.Sprintf("--etcd-servers=http://%s:%d", l.addresses.loopback(), etcdPort),
			"--bind-address=" + l.addresses.host(), fmt.Sprintf("--secure-port=%d", apiPort), "--advertise-address=" + l.addresses.host(),
			"--tls-cert-file=" + l.pki("apiserver.crt"), "--tls-private-key-file=" + l.pki("apiserver.key"),
			"--client-ca-file=" + l.pki("ca.crt"),
			"--service-cluster-ip-range=" + l.addresses.serviceNetwork(),
			"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
			"--service-account-key-file=" + l.pki("service-accounts.key"),
			"--service-account-signing-key-file=" + l.pki("service-accounts.key"),
			"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
			"--allow-privileged=true",
			// The API server uses these credentials for kubectl logs and exec.
			"--kubelet-client-certificate=" + l.pki("apiserver-kubelet.crt"), "--kubelet-client-key=" + l.pki("apiserver-kubelet.key"),
			"--kubelet-certificate-authority=" + l.pki("ca.crt"), "--kubelet-preferred-address-types=InternalIP",
			// Call webhooks at their pods' addresses, because no kube-proxy runs on the machine.
			"--enable-aggregator-routing=true",
			// After SIGTERM, close open watches early. By default, the server first waits up to a minute for
			// open watches to end.
			"--shutdown-watch-termination-grace-period=5s",
		}
	case kindControllerManager:
		kubeconfig := l.config("controller-manager.kubeconfig")
		return []string{
			kube("kube-controller-manager"), "--bind-address=" + l.addresses.loopback(),
			"--kubeconfig=" + kubeconfig, "--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig,
			"--leader-elect=false", "--use-service-account-credentials=true",
			// The default of 20 requests per second delays the start by four seconds.
			"--kube-api-qps=200", "--kube-api-burst=400",
			"--service-account-private-key-file=" + l.pki("service-accounts.key"), "--root-ca-file=" + l.pki("ca.crt"),
			"--cluster-signing-cert-file=" + l.pki("ca.crt"), "--cluster-signing-key-file=" + l.pki("ca.key"),
		}
	case kindScheduler:
		kubeconfig := l.config("scheduler.kubeconfig")
		return []string{
			kube("kube-scheduler"), "--bind-address=" + l.addresses.loopback(), "--leader-elect=false",
			"--kubeconfig=" + kubeconfig, "--authentication-kubeconfig=" + kubeconfig, "--authorization-kubeconfig=" + kubeconfig,
		}
	case kindPolicies:
		return []string{l.launcher, "--name=" + l.name, "--state=" + l.dir, commandEnforce}
	case kindContainerd:
		return []string{containerdInNode + "/containerd", "--config=/etc/containerd/config.toml"}
	case kindKubelet:
		return []string{
			kubeInNode + "/kubelet", "--config=/etc/kubernetes/kubelet.json", "--kubeconfig=/etc/kubernetes/kubelet.kubeconfig",
			"--hostname-override=" + c.node, "-v=2",
		}
	case kindProxy:
		return []string{kubeInNode + "/kube-proxy", "--config=/etc/kubernetes/kube-proxy.json", "--hostname-override=" + c.node}
	}
	panic("no command line for " + c.String()) // bootNode starts kindNode
}

// object is a part of a configuration file. JSON is valid YAML.
type object = map[string]any

// kubeletConfig returns the kubelet's configuration. It changes defaults only where necessary.
func kubeletConfig(a addresses, n node) object {
	config := object{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",
		"authentication": object{
			"anonymous": object{"enabled": false},
			"webhook":   object{"enabled": true},
			"x509":      object{"clientCAFile": "/etc/kubernetes/pki/ca.crt"},
		},
		"authorization":            object{"mode": "Webhook"},
		"tlsCertFile":              "/etc/kubernetes/pki/kubelet.crt",
		"tlsPrivateKeyFile":        "/etc/kubernetes/pki/kubelet.key",
		"address":                  a.node(n),
		"healthzBindAddress":       a.node(n), // reachable from the machine
		"containerRuntimeEndpoint": "unix://" + containerdSocket,
		"clusterDomain":            "cluster.local",
		// This service has no endpoints, so DNS queries fail immediately. Without a DNS service, the
		// kubelet creates a warning event for every pod.
		"clusterDNS":    []string{a.dnsService()},
		"resolvConf":    "",
		"cgroupDriver":  "cgroupfs",
		"failCgroupV1":  false,
		"cgroupsPerQOS": true,
		"failSwapOn":    false,
		// The disk belongs to the developer. If it is full, the kubelet must not evict pods, or collect
		// images that no registry has.
		"evictionHard": object{
			"memory.available": "100Mi", "nodefs.available": "0%", "nodefs.inodesFree": "0%",
			"imagefs.available": "0%", "imagefs.inodesFree": "0%",
		},
		"imageGCHighThresholdPercent": 100,
		"imageGCLowThresholdPercent":  99,
		// Keep the OOM score, because the kubelet cannot lower the score without CAP_SYS_RESOURCE.
		"oomScoreAdj": 0,
	}
	if n.StatusSeconds > 0 {
		config["nodeStatusUpdateFrequency"] = fmt.Sprintf("%ds", n.StatusSeconds)
		// Report an unchanged status at the default interval. Without this setting, the kubelet would
		// also report an unchanged status at nodeStatusUpdateFrequency.
		config["nodeStatusReportFrequency"] = "5m0s"
	}
	return config
}

// maxStatusSeconds is the maximum of StatusSeconds. It is less than the time after which the
// controller manager considers a silent node unhealthy.
const maxStatusSeconds = 30

func proxyConfig(a addresses, n node) object {
	return object{
		"apiVersion":         "kubeproxy.config.k8s.io/v1alpha1",
		"kind":               "KubeProxyConfiguration",
		"mode":               "iptables",
		"clientConnection":   object{"kubeconfig": "/etc/kubernetes/proxy.kubeconfig"},
		"clusterCIDR":        a.podNetwork(),
		"bindAddress":        a.node(n),
		"healthzBindAddress": a.node(n) + ":10256",
		"metricsBindAddress": "127.0.0.1:10249",
		"oomScoreAdj":        0,
		// 0 keeps the machine's limits, which kube-proxy cannot write on a node.
		"conntrack": object{
			"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
		},
	}
}

// networkConfig is the CNI configuration. Each pod has a separate link, and the node routes its
// packets.
func networkConfig(a addresses, n node) object {
	return object{
		"cniVersion": "1.0.0",
		"name":       "pods",
		"plugins": []object{{
			"type": "ptp",
			"ipam": object{
				"type":    "host-local",
				"ranges":  [][]object{{{"subnet": a.pods(n)}}},
				"routes":  []object{{"dst": "0.0.0.0/0"}},
				"dataDir": "/run/cni/addresses", // cleared at boot
			},
		}},
	}
}

// containerdConfig is containerd's configuration. containerd 2 always enables CDI, so the
// configuration sets only the directories for CDI.
const containerdConfig = `version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = "` + containerdSocket + `"

[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "` + pauseImage + `"

[plugins.'io.containerd.cri.v1.runtime']
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  # Without CAP_SYS_RESOURCE a container's score cannot be below containerd's.
  restrict_oom_score_adj = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["` + cniInNode + `"]
    conf_dir = "/etc/cni/net.d"
    use_internal_loopback = true
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
`

const pauseImage = "localhost/pause:dev"
