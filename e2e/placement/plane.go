package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	nodefast "sigs.k8s.io/kwok/kustomize/stage/node/fast"
	heartbeat "sigs.k8s.io/kwok/kustomize/stage/node/heartbeat-with-lease"
	podfast "sigs.k8s.io/kwok/kustomize/stage/pod/fast"
)

// The users of a plane. The operator's user has the name of the operator's service account, so that
// the chart's roles and admission policies apply.
const (
	userAdmin             = "admin"
	userKwok              = "kwok" // nodes and kubelets; admission policies accept their group
	userScheduler         = "system:kube-scheduler"
	userControllerManager = "system:kube-controller-manager"
	userOperator          = "system:serviceaccount:" + cleaveNamespace + ":cleave-operator"
)

// startTimeout is the maximum time to wait until a component serves.
const startTimeout = time.Minute

// programs contains the paths of the plane's programs.
type programs struct {
	kube     string // directory with etcd, kube-apiserver …
	helm     string
	kwok     string
	operator string
}

func (p programs) kubernetes(name string) string { return filepath.Join(p.kube, name) }

// plane is a separate control plane on free loopback ports: etcd, API server, controller manager,
// scheduler, and kwok instead of kubelets.
type plane struct {
	programs programs
	dir      string
	logs     string
	url      string
	tokens   map[string]string
	running  []*process
	failed   context.CancelCauseFunc

	client kubernetes.Interface // protobuf
	custom rest.Interface       // JSON, by absolute paths
}

// tuning replaces default settings of the scheduler and the controller manager. qps is the limit of
// requests per second, or 0 for the default limit.
type tuning struct{ qps int }

// connection is the scheduler's configuration of its connection to the API server.
func (t tuning) connection(kubeconfig string) object {
	connection := object{"kubeconfig": kubeconfig, "contentType": "application/vnd.kubernetes.protobuf"}
	if t.qps > 0 {
		connection["qps"], connection["burst"] = t.qps, t.qps
	}
	return connection
}

// flags returns the flags of the controller manager that set the limit.
func (t tuning) flags() []string {
	if t.qps == 0 {
		return nil
	}
	return []string{fmt.Sprintf("--kube-api-qps=%d", t.qps), fmt.Sprintf("--kube-api-burst=%d", t.qps)}
}

// startPlane starts a control plane with its files below dir. The returned context ends when a
// process of the control plane exits.
func startPlane(parent context.Context, with programs, dir, logs string, t tuning) (_ *plane, _ context.Context, err error) {
	ctx, cancel := context.WithCancelCause(parent)
	p := &plane{programs: with, dir: dir, logs: logs, tokens: make(map[string]string), failed: cancel}
	defer func() {
		if err != nil {
			p.stop()
		}
	}()
	ports, err := freePorts(4)
	if err != nil {
		return nil, nil, err
	}
	etcdURL := fmt.Sprintf("http://127.0.0.1:%d", ports[0])
	p.url = fmt.Sprintf("https://127.0.0.1:%d", ports[1])
	if err := os.MkdirAll(logs, 0o755); err != nil {
		return nil, nil, err
	}
	if err := p.writeCredentials(); err != nil {
		return nil, nil, err
	}
	if _, err := p.start("etcd", nil, with.kubernetes("etcd"),
		"--data-dir="+p.path("etcd"), "--listen-client-urls="+etcdURL, "--advertise-client-urls="+etcdURL,
		"--listen-peer-urls=http://127.0.0.1:0", "--unsafe-no-fsync", "--log-level=warn"); err != nil {
		return nil, nil, err
	}
	if _, err := p.start("apiserver", nil, with.kubernetes("kube-apiserver"),
		"--etcd-servers="+etcdURL, "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", ports[1]),
		"--cert-dir="+p.path("pki"), "--token-auth-file="+p.path("tokens.csv"),
		"--service-cluster-ip-range=10.0.0.0/24", "--endpoint-reconciler-type=none",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file="+p.path("service-accounts.key"), "--service-account-signing-key-file="+p.path("service-accounts.key"),
		"--authorization-mode=RBAC", "--allow-privileged=true",
		// Disable these plugins, because this plane has no controllers that create service accounts or
		// remove the taint of Ready nodes.
		"--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"); err != nil {
		return nil, nil, err
	}
	if err := p.connect(ctx); err != nil {
		return nil, nil, err
	}
	if err := p.writeJSON("scheduler.json", object{
		"apiVersion": "kubescheduler.config.k8s.io/v1", "kind": "KubeSchedulerConfiguration",
		"leaderElection":   object{"leaderElect": false},
		"clientConnection": t.connection(p.kubeconfig(userScheduler)),
	}); err != nil {
		return nil, nil, err
	}
	if _, err := p.start("scheduler", nil, with.kubernetes("kube-scheduler"),
		"--config="+p.path("scheduler.json"), "--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", ports[2]),
		"--authentication-kubeconfig="+p.kubeconfig(userScheduler), "--authorization-kubeconfig="+p.kubeconfig(userScheduler)); err != nil {
		return nil, nil, err
	}
	manager := p.kubeconfig(userControllerManager)
	argv := append([]string{with.kubernetes("kube-controller-manager"),
		// Run only the controller that creates ResourceClaims from templates, because the benchmark needs
		// no other controller.
		"--controllers=resourceclaim-controller", "--use-service-account-credentials=true", "--leader-elect=false",
		"--bind-address=127.0.0.1", fmt.Sprintf("--secure-port=%d", ports[3]),
		"--kubeconfig=" + manager, "--authentication-kubeconfig=" + manager, "--authorization-kubeconfig=" + manager,
		"--service-account-private-key-file=" + p.path("service-accounts.key")}, t.flags()...)
	if _, err := p.start("controller-manager", nil, argv...); err != nil {
		return nil, nil, err
	}
	stages := []string{nodefast.DefaultNodeInit, heartbeat.DefaultNodeHeartbeatWithLease, podfast.DefaultPodReady, podfast.DefaultPodDelete}
	if err := os.WriteFile(p.path("stages.yaml"), []byte(strings.Join(stages, "\n---\n")), 0o644); err != nil {
		return nil, nil, err
	}
	// Use the lease duration that kwokctl sets, and a larger pod network than the default.
	if _, err := p.start("kwok", nil, with.kwok, "--kubeconfig="+p.kubeconfig(userKwok), "--config="+p.path("stages.yaml"),
		"--manage-all-nodes=true", "--node-lease-duration-seconds=40", "--cidr=10.64.0.0/10"); err != nil {
		return nil, nil, err
	}
	return p, ctx, nil
}

func (p *plane) path(name string) string { return filepath.Join(p.dir, name) }

func (p *plane) writeJSON(name string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return os.WriteFile(p.path(name), text, 0o600)
}

// kubeconfig returns the path of a user's kubeconfig.
func (p *plane) kubeconfig(user string) string {
	return p.path(strings.ReplaceAll(user, ":", "-") + ".kubeconfig")
}

// start runs a program and writes its output to a log. An unexpected exit of the program ends the
// plane's context.
func (p *plane) start(name string, env []string, argv ...string) (*process, error) {
	started, err := startProcess(name, filepath.Join(p.logs, name+".log"), env, argv)
	if err != nil {
		return nil, err
	}
	p.running = append(p.running, started)
	go func() {
		<-started.done
		if !started.stopping.Load() {
			p.failed(fmt.Errorf("%s exited (%v): see %s", name, started.err, started.log))
		}
	}()
	return started, nil
}

// stop stops the processes in the reverse of their start order.
func (p *plane) stop() {
	// End the context first, so that no goroutine queries a stopped API server.
	p.failed(errors.New("the control plane was stopped"))
	for i := len(p.running) - 1; i >= 0; i-- {
		p.running[i].stop()
	}
}

// writeCredentials writes the tokens and kubeconfigs of the users, and the key of service accounts.
func (p *plane) writeCredentials() error {
	var lines strings.Builder
	for user, group := range map[string]string{
		userAdmin: "system:masters", userKwok: "system:masters,system:nodes", userScheduler: "", userControllerManager: "", userKarpenter: "system:masters",
		userOperator: "system:serviceaccounts,system:serviceaccounts:" + cleaveNamespace,
	} {
		var token [16]byte
		if _, err := rand.Read(token[:]); err != nil {
			return err
		}
		p.tokens[user] = hex.EncodeToString(token[:])
		fmt.Fprintf(&lines, "%s,%s,%s,%q\n", p.tokens[user], user, user, group)
		err := p.writeJSON(filepath.Base(p.kubeconfig(user)), object{
			"apiVersion": "v1", "kind": "Config", "current-context": "placement",
			"clusters": []object{{"name": "placement", "cluster": object{"server": p.url, "certificate-authority": p.path("pki/apiserver.crt")}}},
			"users":    []object{{"name": "placement", "user": object{"token": p.tokens[user]}}},
			"contexts": []object{{"name": "placement", "context": object{"cluster": "placement", "user": "placement"}}},
		})
		if err != nil {
			return err
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	block := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
	return errors.Join(
		os.WriteFile(p.path("service-accounts.key"), block, 0o600),
		os.WriteFile(p.path("tokens.csv"), []byte(lines.String()), 0o600))
}

// connect waits for the API server and creates the clients.
func (p *plane) connect(ctx context.Context) error {
	err := waitUntil(ctx, startTimeout, "the API server to serve", func(ctx context.Context) (bool, error) {
		// Skip verification, because the API server creates its certificate at the start.
		transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url+"/readyz", nil)
		if err != nil {
			return false, err
		}
		response, err := (&http.Client{Transport: transport, Timeout: 5 * time.Second}).Do(request)
		if err != nil {
			return false, nil
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK, nil
	})
	if err != nil {
		return err
	}
	config := &rest.Config{
		Host: p.url, BearerToken: p.tokens[userAdmin], QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAFile: p.path("pki/apiserver.crt")},
	}
	custom, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	p.custom = custom.Discovery().RESTClient()
	config = rest.CopyConfig(config)
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	p.client, err = kubernetes.NewForConfig(config)
	return err
}

// freePorts returns unused ports of the loopback device.
func freePorts(count int) ([]int, error) {
	ports := make([]int, 0, count)
	for range count {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		// Close the listeners only when the function returns, so that no port is returned twice.
		defer listener.Close()
		ports = append(ports, listener.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

// waitUntil repeats a check until the check succeeds or returns an error, or until limit has
// passed.
func waitUntil(ctx context.Context, limit time.Duration, what string, check func(context.Context) (bool, error)) error {
	late := fmt.Errorf("timed out after %s waiting for %s", limit, what)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, late)
	defer cancel()
	for {
		done, err := check(ctx)
		if done {
			return nil
		}
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("waiting for %s: %w", what, err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// workDir creates a directory for one run, and removes the directories that killed runs left. It
// locks the new directory until this process exits.
func workDir() (dir string, remove func(), err error) {
	const prefix = "cleave-placement-"
	stale, err := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*"))
	if err != nil {
		return "", nil, err
	}
	for _, other := range stale {
		if file, err := lockDir(other); err == nil {
			_ = os.RemoveAll(other)
			file.Close()
		}
	}
	if dir, err = os.MkdirTemp("", prefix); err != nil {
		return "", nil, err
	}
	file, err := lockDir(dir)
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	return dir, func() {
		_ = os.RemoveAll(dir)
		file.Close()
	}, nil
}

// lockDir locks a directory. It fails if another process has the lock.
func lockDir(dir string) (*os.File, error) {
	file, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}
