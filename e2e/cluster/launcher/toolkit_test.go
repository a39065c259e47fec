package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestToolkitIsTheDefaultRuntimeOnlyIfAsked(t *testing.T) {
	const isDefault = `default_runtime_name = "nvidia"`
	if config := toolkitConfig(""); config != "" {
		t.Errorf("without the toolkit: %s", config)
	}
	for use, expected := range map[string]bool{toolkitDefault: true, toolkitClass: false} {
		config := toolkitConfig(use)
		if !strings.Contains(config, "runtimes.nvidia]") || strings.Contains(config, isDefault) != expected {
			t.Errorf("%s: %s", use, config)
		}
	}
}

func TestToolkitAndDriverAreBelowUsr(t *testing.T) {
	driver, toolkit, usr := t.TempDir(), t.TempDir(), filepath.Join(t.TempDir(), "usr")
	write(t, filepath.Join(driver, "lib", "libcuda.so.1.2"), "driver")
	write(t, filepath.Join(driver, "bin", "nvidia-smi"), "driver")
	write(t, filepath.Join(toolkit, "nvidia-ctk"), "toolkit")
	write(t, filepath.Join(usr, "bin", "stale"), "")
	if err := installToolkit(usr, driver, toolkit); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"lib/x86_64-linux-gnu/libcuda.so.1.2", "bin/nvidia-smi", "bin/nvidia-ctk"} {
		if _, err := os.Stat(filepath.Join(usr, path)); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(filepath.Join(usr, "bin", "stale")); err == nil {
		t.Error("a file of an earlier boot remains")
	}
}

func TestToolkitsModuleHasItsTools(t *testing.T) {
	content, err := os.ReadFile(filepath.Join("..", toolkitUnit.dir, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range toolkitUnit.packages {
		if !strings.Contains(string(content), "\t"+name+"\n") {
			t.Errorf("go.mod has no tool %s", name)
		}
	}
}
