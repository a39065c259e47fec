package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// timeout limits each wait.
const timeout = 5 * time.Minute

// writeConfig writes a Prometheus configuration that corresponds to a rendered PodMonitor. The
// configuration scrapes as with the Prometheus Operator, but reads the targets from a file.
func writeConfig(rendered, directory string) error {
	var monitor struct {
		Spec struct {
			Endpoints []struct {
				HonorLabels bool             `yaml:"honorLabels"`
				Relabelings []map[string]any `yaml:"relabelings"`
			} `yaml:"podMetricsEndpoints"`
		} `yaml:"spec"`
	}
	if err := findObject(rendered, "PodMonitor", &monitor); err != nil {
		return err
	}
	if len(monitor.Spec.Endpoints) != 1 {
		return fmt.Errorf("the PodMonitor has %d endpoints, not one", len(monitor.Spec.Endpoints))
	}
	endpoint := monitor.Spec.Endpoints[0]
	return writeYAML(filepath.Join(directory, "prometheus.yml"), map[string]any{
		"global":     map[string]any{"scrape_interval": "1s", "evaluation_interval": "1s"},
		"rule_files": []string{"shortened.yaml"},
		"scrape_configs": []any{map[string]any{
			"job_name":        "cleave-system/cleave",
			"honor_labels":    endpoint.HonorLabels,
			"file_sd_configs": []any{map[string]any{"files": []string{"targets.json"}, "refresh_interval": "1s"}},
			"relabel_configs": endpoint.Relabelings,
		}},
	})
}

// writeTargets writes the running pods of a PodList as scrape targets, with the labels that the
// Prometheus Operator adds.
func writeTargets(pods io.Reader, out string) error {
	var list struct {
		Items []struct {
			Metadata struct{ Name, Namespace string }
			Spec     struct{ Containers []struct{ Name string } }
			Status   struct{ PodIP, Phase string }
		}
	}
	if err := json.NewDecoder(pods).Decode(&list); err != nil {
		return err
	}
	type group struct {
		Targets []string          `json:"targets"`
		Labels  map[string]string `json:"labels"`
	}
	groups := []group{}
	for _, pod := range list.Items {
		if pod.Status.Phase != "Running" || len(pod.Spec.Containers) == 0 {
			continue
		}
		labels := map[string]string{
			"namespace": pod.Metadata.Namespace, "pod": pod.Metadata.Name, "container": pod.Spec.Containers[0].Name,
		}
		groups = append(groups, group{[]string{pod.Status.PodIP + ":8080"}, labels})
	}
	text, err := json.Marshal(groups)
	if err != nil {
		return err
	}
	// Write and rename, so that Prometheus never reads a partial file.
	if err := os.WriteFile(out+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(out+".new", out)
}

// get sends a request to Prometheus's API and decodes the data of the answer.
func get(address, path string, query url.Values, data any) error {
	response, err := http.Get(address + path + "?" + query.Encode())
	if err != nil {
		return err
	}
	defer response.Body.Close()
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		return err
	}
	if answer.Status != "success" {
		return fmt.Errorf("%s: %s", path, answer.Error)
	}
	return json.Unmarshal(answer.Data, data)
}

// alert is a pending or firing alert, as Prometheus reports it.
type alert struct {
	State       string
	Labels      map[string]string
	Annotations map[string]string
}

// firingAlerts returns the alerts that are firing now, by name.
func firingAlerts(address string) (map[string]alert, error) {
	var data struct{ Alerts []alert }
	if err := get(address, "/api/v1/alerts", nil, &data); err != nil {
		return nil, err
	}
	firing := map[string]alert{}
	for _, alert := range data.Alerts {
		if alert.State == "firing" {
			firing[alert.Labels["alertname"]] = alert
		}
	}
	return firing, nil
}

// waitUntilFiring waits until each of these alerts has fired once. The alerts do not have to fire
// at the same time, because alerts about new events soon stop firing.
func waitUntilFiring(address string, names []string) error {
	missing := slices.Clone(names)
	for end := time.Now().Add(timeout); len(missing) > 0 && time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		firing, err := firingAlerts(address)
		if err != nil {
			return err
		}
		missing = slices.DeleteFunc(missing, func(name string) bool {
			alert, fires := firing[name]
			if fires {
				fmt.Printf("fires: %s: %s\n", name, alert.Annotations["summary"])
			}
			return fires
		})
	}
	if len(missing) > 0 {
		return fmt.Errorf("these alerts do not fire: %s", strings.Join(missing, ", "))
	}
	return nil
}

// waitUntilSilent waits until Prometheus has data from the leading operator and about GPUs, and no
// alert is firing.
func waitUntilSilent(address string) error {
	reason := errors.New("Prometheus has not answered")
	for end := time.Now().Add(timeout); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		firing, err := firingAlerts(address)
		if err != nil {
			reason = err
			continue
		}
		var data struct{ Result []any }
		query := url.Values{"query": {"cleave_operator_leader == 1 and on () (sum(cleave_gpu_up) > 0)"}}
		if err := get(address, "/api/v1/query", query, &data); err != nil || len(data.Result) == 0 {
			reason = errors.New("Prometheus has no data of the leading operator and of GPUs")
			continue
		}
		if len(firing) == 0 {
			return nil
		}
		reason = fmt.Errorf("alerts fire without a fault: %s", strings.Join(slices.Sorted(maps.Keys(firing)), ", "))
	}
	return reason
}

// query is a query of a dashboard, with the dashboard's variables replaced.
type query struct {
	panel string
	expr  string
}

func dashboardQueries(file string) ([]query, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		return nil, err
	}
	variables := strings.NewReplacer("$node", ".*", "$namespace", ".*", "$__rate_interval", "1m", "$__range", "1h")
	var queries []query
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			queries = append(queries, query{panel.Title, variables.Replace(target.Expr)})
		}
	}
	if len(queries) == 0 {
		return nil, fmt.Errorf("%s has no queries", file)
	}
	return queries, nil
}

// checkDashboard waits until each query of a dashboard has returned data.
func checkDashboard(address, file string) error {
	queries, err := dashboardQueries(file)
	if err != nil {
		return err
	}
	missing := queries
	for end := time.Now().Add(timeout); len(missing) > 0 && time.Now().Before(end); time.Sleep(time.Second) {
		var empty []query
		for _, query := range missing {
			var data struct {
				Result []struct{ Value [2]any }
			}
			if err := get(address, "/api/v1/query", url.Values{"query": {query.expr}}, &data); err != nil {
				return fmt.Errorf("%s: %w", query.panel, err)
			}
			// A quantile without observations is NaN, so NaN is not data.
			isData := func(sample struct{ Value [2]any }) bool { return sample.Value[1] != "NaN" }
			if !slices.ContainsFunc(data.Result, isData) {
				empty = append(empty, query)
			}
		}
		missing = empty
	}
	var problems []string
	for _, query := range missing {
		problems = append(problems, fmt.Sprintf("panel %q: %s returns no data", query.panel, query.expr))
	}
	if len(problems) > 0 {
		return errors.New(strings.Join(problems, "\n"))
	}
	fmt.Printf("all %d queries of the dashboard return data\n", len(queries))
	return nil
}
