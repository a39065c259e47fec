package main

import "testing"

func TestTheFewestBinsAreFound(t *testing.T) {
	for _, c := range []struct {
		items []int
		want  int
	}{
		{nil, 0},
		{[]int{10, 10, 1}, 3},
		{[]int{5, 5, 5}, 2},
		{[]int{6, 6, 6, 4, 4, 4}, 3},
		{[]int{6, 6, 6}, 3},
		// The heuristic first-fit decreasing would need four bins.
		{[]int{4, 4, 3, 3, 3, 3, 2, 2, 2, 2, 2}, 3},
		// The sum of the items is the size of seven bins, but two items do not fit into one bin.
		{[]int{7, 7, 7, 7, 7, 7, 7, 7, 7, 7}, 10},
	} {
		if got := fewestBins(c.items, 10); got != c.want {
			t.Errorf("%v: %d bins, not %d", c.items, got, c.want)
		}
	}
}
