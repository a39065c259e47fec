package main

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestStoredAddressesAreThoseOfAllClusters(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"a": `{"layout": 1}`, // of a launcher without numbers
		"b": `{"layout": 9, "addresses": 3}`,
		"c": `{"addresses": 1`, // a damaged state
	} {
		if err := writeFile(filepath.Join(dir, name, stateFileName), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := storedAddresses(dir)
	slices.Sort(got)
	if err != nil || !slices.Equal(got, []addresses{0, 3}) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := storedAddresses(filepath.Join(dir, "none")); err != nil || len(got) != 0 {
		t.Errorf("without clusters: %v, %v", got, err)
	}
}

func TestOnlyOneClusterClaimsAtATime(t *testing.T) {
	dir := t.TempDir()
	unlock, err := lockClaims(context.Background(), dir, func() {})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if _, err := lockClaims(ctx, dir, cancel); err == nil {
		t.Error("two clusters claim at the same time")
	}
	unlock()
	again, err := lockClaims(context.Background(), dir, func() { t.Error("it waits for nobody") })
	if err != nil {
		t.Fatal(err)
	}
	again()
	if files, err := os.ReadDir(dir); err != nil || len(files) != 0 {
		t.Errorf("files remain: %v, %v", files, err)
	}
}

// The command down removes the devices that a cluster owns.
func TestAClusterOwnsOnlyItsDevices(t *testing.T) {
	mine := testLayout(t)
	mine.addresses, mine.claimed = 1, true
	other := layout{name: "test", dir: mine.dir + "2"}
	for what, c := range map[string]struct {
		name, alias string
		want        bool
	}{
		"its bridge":                                       {"cleave-e2e-c1", mine.marker(), true},
		"its node":                                         {"ce2e-c1-2", mine.marker(), true},
		"a device of lost addresses":                       {"ce2e-c5-2", mine.marker(), true},
		"another cluster's bridge":                         {"cleave-e2e", other.marker(), false},
		"another cluster at its addresses":                 {"ce2e-c1-2", other.marker(), false},
		"a device that was just created":                   {"ce2e-c1-2", "", true},
		"the same of another cluster":                      {"ce2e-1", "", false},
		"a bridge of another cluster":                      {"cleave-e2e", "", false},
		"a cluster with a number that starts like its own": {"ce2e-c11-2", "", false},
		"the machine's device":                             {"eth0", "", false},
	} {
		if got := mine.ownsDevice(&netlink.LinkAttrs{Name: c.name, Alias: c.alias}); got != c.want {
			t.Errorf("%s: %v", what, got)
		}
	}
	// While the first cluster starts, the command down may remove a cluster that never started.
	without := layout{name: "test", dir: mine.dir}
	if without.ownsDevice(&netlink.LinkAttrs{Name: "cleave-e2e"}) {
		t.Error("a cluster without addresses owns the bridge that the first cluster just created")
	}
}

func TestAnInterruptedListIsRepeated(t *testing.T) {
	attempts := 0
	got, err := list(func() ([]int, error) {
		if attempts++; attempts < 3 {
			return []int{1}, netlink.ErrDumpInterrupted
		}
		return []int{1, 2}, nil
	})
	if err != nil || len(got) != 2 || attempts != 3 {
		t.Errorf("%v, %v after %d attempts", got, err, attempts)
	}
	if _, err := list(func() ([]int, error) { return nil, netlink.ErrDumpInterrupted }); err == nil {
		t.Error("a list that is always interrupted succeeds")
	}
}

func TestMarkedDirIsTheDirectoryOfTheMarker(t *testing.T) {
	l := testLayout(t)
	if got := markedDir([]byte("PATH=/bin\x00" + l.marker() + "\x00HOME=/\x00")); got != l.dir {
		t.Errorf("got %q, want %q", got, l.dir)
	}
	if got := markedDir([]byte("PATH=/bin\x00")); got != "" {
		t.Errorf("without a marker: %q", got)
	}
}
