package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// api is a minimal client of the API server. The launcher does not use client-go, because building
// it takes longer than building all other packages of the launcher.
type api struct {
	client *http.Client
	url    string
}

func newAPI(l layout) (*api, error) {
	type named struct {
		Cluster struct {
			CA []byte `json:"certificate-authority-data"`
		} `json:"cluster"`
		User struct {
			Certificate []byte `json:"client-certificate-data"`
			Key         []byte `json:"client-key-data"`
		} `json:"user"`
	}
	config, err := readJSON[struct{ Clusters, Users []named }](l.kubeconfig())
	if err != nil {
		return nil, err
	}
	if len(config.Clusters) != 1 || len(config.Users) != 1 {
		return nil, fmt.Errorf("%s was not written by the launcher", l.kubeconfig())
	}
	pair, err := tls.X509KeyPair(config.Users[0].User.Certificate, config.Users[0].User.Key)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(config.Clusters[0].Cluster.CA) {
		return nil, fmt.Errorf("%s has no certificate of the cluster's authority", l.kubeconfig())
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}}}
	return &api{client: &http.Client{Transport: transport, Timeout: 10 * time.Second}, url: l.apiURL()}, nil
}

// statusError is an unsuccessful response of the API server.
type statusError struct {
	code int
	body string
}

func (e *statusError) Error() string {
	return fmt.Sprintf("the API server returned %d: %.300s", e.code, e.body)
}

func isStatus(err error, code int) bool {
	var status *statusError
	return errors.As(err, &status) && status.code == code
}

func (a *api) do(ctx context.Context, method, path string, body any) ([]byte, error) {
	var input io.Reader
	if body != nil {
		encoded, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		input = bytes.NewReader(encoded)
	}
	request, err := http.NewRequestWithContext(ctx, method, a.url+path, input)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := a.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	output, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	if response.StatusCode/100 != 2 {
		return nil, &statusError{response.StatusCode, string(output)}
	}
	return output, nil
}

// nodeReady returns the status of a Node object's Ready condition.
func nodeReady(object []byte) (ready bool, reason string, err error) {
	var n struct {
		Status struct {
			Conditions []struct{ Type, Status, Message string }
		}
	}
	if err := json.Unmarshal(object, &n); err != nil {
		return false, "", err
	}
	for _, condition := range n.Status.Conditions {
		if condition.Type == "Ready" {
			return condition.Status == "True", condition.Message, nil
		}
	}
	return false, "it has no Ready condition yet", nil
}

func (a *api) waitNodeReady(ctx context.Context, name string) error {
	err := poll(ctx, func() error {
		object, err := a.do(ctx, http.MethodGet, "/api/v1/nodes/"+name, nil)
		if err != nil {
			return err
		}
		ready, reason, err := nodeReady(object)
		if err == nil && !ready {
			err = errors.New(reason)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%s is not Ready: %w", name, err)
	}
	return nil
}

// prepareCluster waits for the default service account, which a first pod needs. It also creates
// the service kube-dns at the address for which the kubelets are configured. The service has no
// endpoints, so DNS queries fail immediately.
func (a *api) prepareCluster(ctx context.Context, dnsAddress string) error {
	err := poll(ctx, func() error {
		_, err := a.do(ctx, http.MethodGet, "/api/v1/namespaces/default/serviceaccounts/default", nil)
		return err
	})
	if err != nil {
		return fmt.Errorf("the default service account does not exist: %w", err)
	}
	_, err = a.do(ctx, http.MethodPost, "/api/v1/namespaces/kube-system/services", object{
		"apiVersion": "v1", "kind": "Service",
		"metadata": object{"name": "kube-dns", "annotations": object{"description": "This cluster has no DNS server. Queries fail at once."}},
		"spec": object{"clusterIP": dnsAddress, "ports": []object{
			{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
		}},
	})
	// Accept 422 too: if the service exists, its address is in use.
	if err != nil && !isStatus(err, http.StatusConflict) && !isStatus(err, http.StatusUnprocessableEntity) {
		return fmt.Errorf("create the service kube-dns: %w", err)
	}
	return nil
}

func (a *api) deleteNode(ctx context.Context, name string) error {
	_, err := a.do(ctx, http.MethodDelete, "/api/v1/nodes/"+name, nil)
	if isStatus(err, http.StatusNotFound) {
		return nil
	}
	return err
}

// poll repeats try until it succeeds. At the deadline, poll returns the last error.
func poll(ctx context.Context, try func() error) error {
	ctx, cancel := context.WithTimeout(ctx, serveTimeout)
	defer cancel()
	var last error
	for {
		err := try()
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return last
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// waitUntilServing waits until a component serves. The error after the deadline states whether the
// component has exited.
func (c *cluster) waitUntilServing(ctx context.Context, one component, p process) error {
	err := poll(ctx, func() error {
		err := c.checkServing(ctx, one)
		if err != nil && !p.isRunning() {
			return &endedError{one}
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("%s does not serve: %w", one, err)
	}
	return nil
}

type endedError struct{ component component }

func (e *endedError) Error() string { return e.component.String() + " has ended" }

// checkServing returns nil if a component serves, and otherwise an error.
func (c *cluster) checkServing(ctx context.Context, one component) error {
	switch one.kind {
	case kindNode:
		return nil // bootNode has already waited
	case kindContainerd:
		connection, err := net.DialTimeout("unix", c.layout.inNode(one.node, containerdSocket), time.Second)
		if err != nil {
			return err
		}
		return connection.Close()
	case kindAPIServer:
		a, err := newAPI(c.layout)
		if err != nil {
			return err
		}
		_, err = a.do(ctx, http.MethodGet, "/readyz", nil)
		return err
	}
	url, err := c.healthURL(one)
	if err != nil {
		return err
	}
	// Do not verify the certificates: they are self-signed, and the connection is local.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}
	client := &http.Client{Transport: transport, Timeout: 5 * time.Second}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s returned %s", url, response.Status)
	}
	return nil
}

func (c *cluster) healthURL(one component) (string, error) {
	loopback := c.layout.addresses.loopback()
	switch one.kind {
	case kindEtcd:
		return fmt.Sprintf("http://%s:%d/readyz", loopback, etcdPort), nil
	case kindControllerManager:
		return "https://" + loopback + ":10257/healthz", nil
	case kindScheduler:
		return "https://" + loopback + ":10259/healthz", nil
	case kindPolicies:
		return fmt.Sprintf("http://%s:%d/", loopback, policiesPort), nil
	}
	n, err := readJSON[node](c.layout.nodeFile(one.node))
	if err != nil {
		return "", err
	}
	if one.kind == kindKubelet {
		return "http://" + c.layout.addresses.node(n) + ":10248/healthz", nil
	}
	return "http://" + c.layout.addresses.node(n) + ":10256/livez", nil
}
