// Command monitoring checks Cleave's alert rules and dashboard. See `monitoring help` and the
// script `test` in the same directory.
package main

import (
	"fmt"
	"os"
)

const usage = `usage: monitoring COMMAND ARGUMENT…
  rules RENDERED OUT           write the rules of a rendered PrometheusRule
  shorten RULES OUT            write the same rules with durations of seconds
  lint REPOSITORY RULES TESTS  check that alerts have tests and runbooks, and that queries use
                               metrics that exist
  config RENDERED DIR          write DIR/prometheus.yml, which scrapes like a rendered PodMonitor
  targets OUT                  write the pods of a PodList on standard input as scrape targets
  silent URL                   wait until Prometheus has data and no alert fires
  firing URL ALERT…            wait until each of these alerts has fired
  dashboard URL FILE           check that each query of a dashboard returns data`

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	if len(arguments) == 0 {
		return fmt.Errorf("no command\n%s", usage)
	}
	command, rest := arguments[0], arguments[1:]
	switch {
	case command == "rules" && len(rest) == 2:
		return extractRules(rest[0], rest[1])
	case command == "shorten" && len(rest) == 2:
		return shortenRules(rest[0], rest[1])
	case command == "lint" && len(rest) == 3:
		return lint(rest[0], rest[1], rest[2])
	case command == "config" && len(rest) == 2:
		return writeConfig(rest[0], rest[1])
	case command == "targets" && len(rest) == 1:
		return writeTargets(os.Stdin, rest[0])
	case command == "silent" && len(rest) == 1:
		return waitUntilSilent(rest[0])
	case command == "firing" && len(rest) >= 2:
		return waitUntilFiring(rest[0], rest[1:])
	case command == "dashboard" && len(rest) == 2:
		return checkDashboard(rest[0], rest[1])
	}
	return fmt.Errorf("invalid arguments\n%s", usage)
}
