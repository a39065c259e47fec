package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"
)

// ruleFile is the content of a Prometheus rule file.
type ruleFile struct {
	Groups []ruleGroup `yaml:"groups"`
}

type ruleGroup struct {
	Name  string         `yaml:"name"`
	Rules []rulefmt.Rule `yaml:"rules"`
}

// shortened replaces all ranges and offsets in expressions, and shortWait replaces longWait, so
// that alerts fire within seconds. In the test, Prometheus scrapes targets and evaluates rules
// every second.
const shortened = 20 * time.Second
const shortWait = 5

// longWait is the waiting time of a pod, in seconds, at which an alert fires.
const longWait = 1800

// findObject finds the first object of a kind in a file of rendered objects, and decodes it into
// object.
func findObject(file, kind string, object any) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	documents := yaml.NewDecoder(bytes.NewReader(text))
	for {
		var document yaml.Node
		if err := documents.Decode(&document); errors.Is(err, io.EOF) {
			return fmt.Errorf("%s contains no %s", file, kind)
		} else if err != nil {
			return err
		}
		var header struct {
			Kind string `yaml:"kind"`
		}
		if err := document.Decode(&header); err != nil {
			return err
		}
		if header.Kind == kind {
			return document.Decode(object)
		}
	}
}

func writeYAML(file string, value any) error {
	text, err := yaml.Marshal(value)
	if err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o644)
}

func extractRules(rendered, out string) error {
	var object struct {
		Spec ruleFile `yaml:"spec"`
	}
	if err := findObject(rendered, "PrometheusRule", &object); err != nil {
		return err
	}
	return writeYAML(out, object.Spec)
}

func readRules(file string) (ruleFile, error) {
	var rules ruleFile
	text, err := os.ReadFile(file)
	if err != nil {
		return rules, err
	}
	return rules, yaml.Unmarshal(text, &rules)
}

// shortenRules copies the rules with shorter durations, so that alerts fire within seconds.
func shortenRules(file, out string) error {
	rules, err := readRules(file)
	if err != nil {
		return err
	}
	for _, group := range rules.Groups {
		for i := range group.Rules {
			rule := &group.Rules[i]
			expr, err := parser.NewParser(parser.Options{}).ParseExpr(rule.Expr)
			if err != nil {
				return err
			}
			parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
				switch node := node.(type) {
				case *parser.MatrixSelector:
					node.Range = shortened
				case *parser.VectorSelector:
					if node.OriginalOffset > 0 {
						node.OriginalOffset = shortened
					}
				case *parser.NumberLiteral:
					if node.Val == longWait {
						node.Val = shortWait
					}
				}
				return nil
			})
			rule.Expr = expr.String()
			if rule.For > 0 {
				rule.For = model.Duration(2 * time.Second)
			}
		}
	}
	return writeYAML(out, rules)
}

// lint performs checks that promtool lacks. Each alert needs a test case in which it fires, a test
// case in which it does not fire, and a runbook. Each alert also needs a summary, a runbook URL and
// a severity. Rules and dashboards may use only metrics that are in the reference or that rules
// record.
func lint(repository, file, tests string) error {
	rules, err := readRules(file)
	if err != nil {
		return err
	}
	known, err := knownMetrics(filepath.Join(repository, "docs/reference/metrics.md"))
	if err != nil {
		return err
	}
	fires, silent, err := testedAlerts(tests)
	if err != nil {
		return err
	}
	var problems []string
	for _, group := range rules.Groups {
		for _, rule := range group.Rules {
			if rule.Record != "" {
				known[rule.Record] = true
			}
		}
	}
	check := func(what, expr string) {
		names, err := metricNames(expr)
		if err != nil {
			problems = append(problems, fmt.Sprintf("%s: %v", what, err))
		}
		for _, name := range names {
			if !known[name] {
				problems = append(problems, fmt.Sprintf("%s: there is no metric %s", what, name))
			}
		}
	}
	for _, group := range rules.Groups {
		for _, rule := range group.Rules {
			check(rule.Record+rule.Alert, rule.Expr)
			if rule.Alert == "" {
				continue
			}
			if !fires[rule.Alert] || !silent[rule.Alert] {
				problems = append(problems, rule.Alert+" needs a test in which it fires and one in which it does not")
			}
			if _, err := os.Stat(filepath.Join(repository, "docs/runbooks", rule.Alert+".md")); err != nil {
				problems = append(problems, rule.Alert+" has no runbook")
			}
			if rule.Annotations["summary"] == "" || rule.Annotations["runbook_url"] == "" || rule.Labels["severity"] == "" {
				problems = append(problems, rule.Alert+" needs a summary, a runbook_url and a severity")
			}
		}
	}
	queries, err := dashboardQueries(filepath.Join(repository, "charts/cleave/files/monitoring/dashboard.json"))
	if err != nil {
		return err
	}
	for _, query := range queries {
		check("dashboard, "+query.panel, query.expr)
	}
	if len(problems) > 0 {
		return errors.New(strings.Join(problems, "\n"))
	}
	return nil
}

// knownMetrics returns the names of the time series of all metrics in the reference.
func knownMetrics(page string) (map[string]bool, error) {
	text, err := os.ReadFile(page)
	if err != nil {
		return nil, err
	}
	known := map[string]bool{}
	row := regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| (counter|gauge|histogram) \\|")
	for _, match := range row.FindAllStringSubmatch(string(text), -1) {
		if match[2] == "histogram" {
			for _, suffix := range []string{"_bucket", "_count", "_sum"} {
				known[match[1]+suffix] = true
			}
		} else {
			known[match[1]] = true
		}
	}
	return known, nil
}

// metricNames returns the names of the metrics that an expression selects.
func metricNames(text string) ([]string, error) {
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(text)
	if err != nil {
		return nil, err
	}
	var names []string
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		if selector, ok := node.(*parser.VectorSelector); ok {
			names = append(names, selector.Name)
		}
		return nil
	})
	return names, nil
}

// testedAlerts returns the alerts that a file of promtool unit tests expects to fire, and the
// alerts that the file expects to be silent.
func testedAlerts(file string) (fires, silent map[string]bool, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, nil, err
	}
	var all struct {
		Tests []struct {
			Alerts []struct {
				Name     string `yaml:"alertname"`
				Expected []any  `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		} `yaml:"tests"`
	}
	if err := yaml.Unmarshal(text, &all); err != nil {
		return nil, nil, err
	}
	fires, silent = map[string]bool{}, map[string]bool{}
	for _, test := range all.Tests {
		for _, alert := range test.Alerts {
			if len(alert.Expected) > 0 {
				fires[alert.Name] = true
			} else {
				silent[alert.Name] = true
			}
		}
	}
	return fires, silent, nil
}
