package main

import (
	"cmp"
	"slices"
)

// fewestBins returns the smallest number of bins of this size into which all items fit. No item may
// be larger than a bin. The function tries all packings, except packings that cannot be better.
func fewestBins(items []int, size int) int {
	items = slices.SortedFunc(slices.Values(items), func(a, b int) int { return cmp.Compare(b, a) })
	sum := 0
	for _, item := range items {
		sum += item
	}
	for count := (sum + size - 1) / size; ; count++ {
		if canPack(items, make([]int, count), size, count*size-sum) {
			return count
		}
	}
}

// canPack reports whether the items fit into the bins. The items must be sorted in descending
// order. used contains the used size of each bin. waste is the total size that may remain unused.
func canPack(items, used []int, size, waste int) bool {
	if len(items) == 0 {
		return true
	}
	tried := make(map[int]bool)
	for bin := range used {
		left := size - used[bin] - items[0]
		// Skip a bin with the same free size as an earlier bin, because both are interchangeable.
		if left < 0 || tried[used[bin]] {
			continue
		}
		tried[used[bin]] = true
		lost := 0
		if left < items[len(items)-1] {
			lost = left // no further item fits
		}
		if lost > waste {
			continue
		}
		used[bin] += items[0]
		if canPack(items[1:], used, size, waste-lost) {
			return true
		}
		used[bin] -= items[0]
		if left == 0 {
			// If an item fills a bin exactly, no other bin is better.
			return false
		}
	}
	return false
}
