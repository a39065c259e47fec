//! Counts the units of one resource on one device. Only this module changes a device's free units
//! and its reservations.
use std::collections::BTreeMap;

use super::request::Units;

/// The capacity of one resource on one device, and how many of its units are used and reserved.
///
/// Either `reserved ≤ capacity − used`, or nothing is reserved: [`DeviceUnits::new`] starts without
/// reservations, and only [`DeviceUnits::reserve`] adds one. If the facts change, the caller
/// creates a new value and adds the reservations again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeviceUnits {
    capacity: u32,
    used: u32,
    /// Number of reservations of each size.
    reserved: BTreeMap<Units, u32>,
    free: u32,
}

impl DeviceUnits {
    /// Creates the value for a device without reservations. `used` can exceed `capacity` if units
    /// become unhealthy while they are in use.
    pub(super) fn new(capacity: u32, used: u32) -> Self {
        let mut device_units = Self { capacity, used, reserved: BTreeMap::new(), free: 0 };
        device_units.recount();
        device_units
    }

    /// Updates `free`. No other function sets `free`.
    fn recount(&mut self) {
        self.free = self.capacity.saturating_sub(self.used).saturating_sub(self.reserved());
    }

    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    pub(super) fn used(&self) -> u32 {
        self.used
    }

    /// Returns the units that are neither used nor reserved.
    pub(super) fn free(&self) -> u32 {
        self.free
    }

    /// Returns the units that are reserved.
    pub(super) fn reserved(&self) -> u32 {
        self.reserved.iter().fold(0, |sum, (units, count)| units.get().saturating_mul(*count).saturating_add(sum))
    }

    /// Returns the sizes of the reservations, smallest first.
    pub(super) fn reservations(&self) -> impl Iterator<Item = Units> {
        self.reserved.iter().flat_map(|(units, count)| std::iter::repeat_n(*units, *count as usize))
    }

    /// Reserves units if they are free. Returns true if they were reserved.
    #[must_use]
    pub(super) fn reserve(&mut self, units: Units) -> bool {
        let fits = units.get() <= self.free;
        if fits {
            *self.reserved.entry(units).or_default() += 1;
            self.recount();
        }
        fits
    }

    /// Removes a reservation of this size, if one exists.
    pub(super) fn unreserve(&mut self, units: Units) {
        if let Some(count) = self.reserved.get_mut(&units) {
            *count -= 1;
            if *count == 0 {
                self.reserved.remove(&units);
            }
            self.recount();
        }
    }

    /// Returns a copy without reservations.
    pub(super) fn without_reservations(&self) -> Self {
        Self::new(self.capacity, self.used)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units(units: u32) -> Units {
        Units::new(units).unwrap()
    }

    #[test]
    fn no_more_units_are_reserved_than_are_free() {
        let mut device_units = DeviceUnits::new(10, 3);
        assert!(device_units.reserve(units(4)) && device_units.reserve(units(3)));
        assert!(!device_units.reserve(units(1)));
        assert_eq!((device_units.free(), device_units.reserved()), (0, 7));
        device_units.unreserve(units(4));
        device_units.unreserve(units(4));
        assert_eq!((device_units.free(), device_units.reserved()), (4, 3), "units are freed once");
        assert!(!device_units.reserve(units(5)) && device_units.reserve(units(4)));
    }

    #[test]
    fn an_overused_device_has_no_free_units() {
        let mut device_units = DeviceUnits::new(2, 5);
        assert_eq!(device_units.free(), 0);
        assert!(!device_units.reserve(units(1)) && !device_units.reserve(units(u32::MAX)));
    }
}
