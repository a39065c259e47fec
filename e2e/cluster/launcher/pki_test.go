package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"os"
	"testing"
)

func parseCertificate(t *testing.T, pair keyPair) *x509.Certificate {
	t.Helper()
	if _, err := tls.X509KeyPair(pair.certificate, pair.key); err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(pair.certificate)
	parsed, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

func TestAuthorityCanBeReadAgain(t *testing.T) {
	made, err := newAuthority("test")
	if err != nil {
		t.Fatal(err)
	}
	base := t.TempDir() + "/ca"
	if err := made.write(base); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(base + ".key"); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the key's mode is %v, %v", info.Mode(), err)
	}
	pair, err := readPair(base)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := parseAuthority(pair)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(made.parsed)

	server, err := ca.server("kubelet", "node1", "10.203.0.11")
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"node1", "10.203.0.11"} {
		if _, err := parseCertificate(t, server).Verify(x509.VerifyOptions{Roots: roots, DNSName: host}); err != nil {
			t.Errorf("server %s: %v", host, err)
		}
	}
	if _, err := parseCertificate(t, server).Verify(x509.VerifyOptions{Roots: roots, DNSName: "10.203.0.12"}); err == nil {
		t.Error("the certificate is valid for another address")
	}

	client, err := ca.client("system:node:node1", "system:nodes")
	if err != nil {
		t.Fatal(err)
	}
	parsed := parseCertificate(t, client)
	if _, err := parsed.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Error(err)
	}
	if parsed.Subject.CommonName != "system:node:node1" || parsed.Subject.Organization[0] != "system:nodes" {
		t.Errorf("subject %v", parsed.Subject)
	}
}

func TestCredentialsAreCreatedOnce(t *testing.T) {
	l := layout{name: "test", dir: t.TempDir()}
	n := node{Name: "node1", Index: 1}
	var first []byte
	for range 2 {
		if err := l.makeCredentials(); err != nil {
			t.Fatal(err)
		}
		if err := l.makeNodeCredentials(n); err != nil {
			t.Fatal(err)
		}
		content, err := os.ReadFile(l.kubeconfig())
		if err != nil {
			t.Fatal(err)
		}
		if first != nil && string(first) != string(content) {
			t.Error("a second call replaces them")
		}
		first = content
	}
	if !json.Valid(first) {
		t.Errorf("not JSON: %s", first)
	}
	if _, err := newAPI(l); err != nil {
		t.Errorf("the launcher cannot use its credentials: %v", err)
	}
}
