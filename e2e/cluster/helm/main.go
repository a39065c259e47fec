// Command helm is Helm, built from its packages.
package main

import (
	"errors"
	"log/slog"
	"os"

	helm "helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
)

func main() {
	// Set the field manager of applied objects. The default is the program's name.
	kube.ManagedFieldsManager = "helm"
	command, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err != nil {
		slog.Error("failed to start helm", slog.Any("error", err))
		os.Exit(1)
	}
	if err := command.Execute(); err != nil {
		if exit, ok := errors.AsType[helm.CommandError](err); ok {
			os.Exit(exit.ExitCode)
		}
		os.Exit(1)
	}
}
