package main

import (
	"context"
	"io"
	"net"
	"testing"
)

func TestPercentilesOfAHistogramAreBounds(t *testing.T) {
	text := func(counts string) []byte { return []byte("# TYPE a_seconds histogram\n" + counts + "# EOF\n") }
	before, err := parseHistogram(text("a_seconds_bucket{le=\"0.01\"} 5\na_seconds_bucket{le=\"0.1\"} 6\na_seconds_bucket{le=\"+Inf\"} 7\n"), "a_seconds")
	if err != nil {
		t.Fatal(err)
	}
	after, err := parseHistogram(text("a_seconds_bucket{le=\"0.01\"} 103\na_seconds_bucket{le=\"0.1\"} 106\na_seconds_bucket{le=\"+Inf\"} 107\n"), "a_seconds")
	if err != nil {
		t.Fatal(err)
	}
	during := after.since(before)
	if during.count() != 100 || during.percentile(50) != 0.01 || during.percentile(98) != 0.01 || during.percentile(99) != 0.1 {
		t.Errorf("%+v", during)
	}
	if _, err := parseHistogram(text(""), "a_seconds"); err == nil {
		t.Error("a missing metric is not an error")
	}
}

func TestTheProxyCountsWhatTheServerSends(t *testing.T) {
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	go func() {
		client, err := server.Accept()
		if err != nil {
			return
		}
		defer client.Close()
		_, _ = io.CopyN(client, client, 4)
	}()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	p, err := newProxy(ctx, server.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	client, err := net.Dial("tcp", p.address)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(client)
	if err != nil || string(answer) != "ping" || p.received.Load() != 4 {
		t.Errorf("%q, %v, %d bytes", answer, err, p.received.Load())
	}
}

func TestRunningPodsHaveTheSharesThatTheirNodesReport(t *testing.T) {
	l := &large{nodes: 3, pods: 12}
	run := &trial{nodes: 3, agents: newAgents(3), system: system{resource: cleaveResource}}
	run.agents.statuses = &statusWriter{}
	for index := range 9 {
		one := l.runningPod(run, index, index < 6)
		node := one.Spec.NodeName
		if node != nodeName(index%3) {
			t.Errorf("pod %d is on %s", index, node)
		}
		gpu, err := reservedGPU(one.Annotations[placementAnnotation], node, index%3, gpusPerNode)
		if err != nil {
			t.Error(err)
		}
		held, has := run.agents.nodes[index%3].held[one.Namespace+"/"+one.Name]
		if has != (index < 6) || has && held.gpu != gpu || !has && gpu != -1 {
			t.Errorf("pod %d: GPU %d, allocation %+v %v", index, gpu, held, has)
		}
	}
}
