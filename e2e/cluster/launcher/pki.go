package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"time"
)

// keyPair is a certificate and its private key, in PEM format.
type keyPair struct{ certificate, key []byte }

// authority signs the cluster's certificates.
type authority struct {
	keyPair
	parsed *x509.Certificate
	signer crypto.Signer
}

const validity = 10 * 365 * 24 * time.Hour

func newKey() (*ecdsa.PrivateKey, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	return key, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

func newAuthority(name string) (authority, error) {
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	pair, err := sign(template, nil)
	if err != nil {
		return authority{}, err
	}
	return parseAuthority(pair)
}

func parseAuthority(pair keyPair) (authority, error) {
	certificate, _ := pem.Decode(pair.certificate)
	key, _ := pem.Decode(pair.key)
	if certificate == nil || key == nil {
		return authority{}, errors.New("the cluster's authority is not in PEM")
	}
	parsed, err := x509.ParseCertificate(certificate.Bytes)
	if err != nil {
		return authority{}, err
	}
	signer, err := x509.ParseECPrivateKey(key.Bytes)
	if err != nil {
		return authority{}, err
	}
	return authority{keyPair: pair, parsed: parsed, signer: signer}, nil
}

// sign creates a certificate. If by is nil, the certificate is self-signed.
func sign(template *x509.Certificate, by *authority) (keyPair, error) {
	key, encoded, err := newKey()
	if err != nil {
		return keyPair{}, err
	}
	template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return keyPair{}, err
	}
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().Add(validity)
	parent, signer := template, crypto.Signer(key)
	if by != nil {
		parent, signer = by.parsed, by.signer
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return keyPair{}, err
	}
	return keyPair{pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), encoded}, nil
}

// client creates a certificate for a user of the API. The user is in the group, unless group is "".
func (a *authority) client(user, group string) (keyPair, error) {
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: user},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if group != "" {
		template.Subject.Organization = []string{group}
	}
	return sign(template, a)
}

// server creates a certificate for a server with these names and addresses.
func (a *authority) server(name string, hosts ...string) (keyPair, error) {
	template := &x509.Certificate{
		Subject:     pkix.Name{CommonName: name},
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, host := range hosts {
		if address := net.ParseIP(host); address != nil {
			template.IPAddresses = append(template.IPAddresses, address)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	return sign(template, a)
}

// kubeconfig returns a kubeconfig that contains the client's credentials.
func kubeconfig(cluster, server string, ca []byte, client keyPair) object {
	return object{
		"apiVersion": "v1", "kind": "Config", "current-context": cluster,
		"clusters": []object{{"name": cluster, "cluster": object{"server": server, "certificate-authority-data": ca}}},
		"users":    []object{{"name": cluster, "user": object{"client-certificate-data": client.certificate, "client-key-data": client.key}}},
		"contexts": []object{{"name": cluster, "context": object{"cluster": cluster, "user": cluster}}},
	}
}

// write writes the certificate to base.crt and the key to base.key.
func (p keyPair) write(base string) error {
	return errors.Join(writeFile(base+".crt", p.certificate, 0o644), writeFile(base+".key", p.key, 0o600))
}

func readPair(base string) (keyPair, error) {
	certificate, err := os.ReadFile(base + ".crt")
	if err != nil {
		return keyPair{}, err
	}
	key, err := os.ReadFile(base + ".key")
	if err != nil {
		return keyPair{}, err
	}
	return keyPair{certificate, key}, nil
}

// makeCredentials writes the control plane's certificates and configurations. It writes the
// administrator's kubeconfig last, so all other files are complete if that file exists.
func (l layout) makeCredentials() error {
	if _, err := os.Stat(l.kubeconfig()); err == nil {
		return nil
	}
	ca, err := newAuthority("cleave-e2e " + l.name)
	if err != nil {
		return err
	}
	if err := ca.write(l.pki("ca")); err != nil {
		return err
	}
	server, err := ca.server("kube-apiserver", l.addresses.host(), l.addresses.apiService(), "127.0.0.1", "localhost",
		"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
	if err != nil {
		return err
	}
	if err := server.write(l.pki("apiserver")); err != nil {
		return err
	}
	_, tokens, err := newKey()
	if err != nil {
		return err
	}
	if err := writeFile(l.pki("service-accounts.key"), tokens, 0o600); err != nil {
		return err
	}
	toKubelet, err := ca.client("kube-apiserver", "system:masters")
	if err != nil {
		return err
	}
	if err := toKubelet.write(l.pki("apiserver-kubelet")); err != nil {
		return err
	}
	for _, client := range []struct{ user, group, file string }{
		{"system:kube-controller-manager", "", l.config("controller-manager.kubeconfig")},
		{"system:kube-scheduler", "", l.config("scheduler.kubeconfig")},
		{"admin", "system:masters", l.kubeconfig()},
	} {
		pair, err := ca.client(client.user, client.group)
		if err != nil {
			return err
		}
		if err := writeJSON(client.file, kubeconfig("cleave-e2e-"+l.name, l.apiURL(), ca.certificate, pair)); err != nil {
			return err
		}
	}
	return nil
}

// makeNodeCredentials writes the credentials of a node's kubelet and proxy to the node's
// /etc/kubernetes.
func (l layout) makeNodeCredentials(n node) error {
	done := l.inNode(n.Name, "/etc/kubernetes/kubelet.kubeconfig")
	if _, err := os.Stat(done); err == nil {
		return nil
	}
	pair, err := readPair(l.pki("ca"))
	if err != nil {
		return err
	}
	ca, err := parseAuthority(pair)
	if err != nil {
		return fmt.Errorf("%s: %w", l.pki("ca"), err)
	}
	server, err := ca.server(n.Name, n.Name, l.addresses.node(n))
	if err != nil {
		return err
	}
	if err := server.write(l.inNode(n.Name, "/etc/kubernetes/pki/kubelet")); err != nil {
		return err
	}
	if err := writeFile(l.inNode(n.Name, "/etc/kubernetes/pki/ca.crt"), ca.certificate, 0o644); err != nil {
		return err
	}
	for _, client := range []struct{ user, group, file string }{
		{"system:kube-proxy", "", l.inNode(n.Name, "/etc/kubernetes/proxy.kubeconfig")},
		{"system:node:" + n.Name, "system:nodes", done},
	} {
		pair, err := ca.client(client.user, client.group)
		if err != nil {
			return err
		}
		if err := writeJSON(client.file, kubeconfig("cleave-e2e-"+l.name, l.apiURL(), ca.certificate, pair)); err != nil {
			return err
		}
	}
	return nil
}
