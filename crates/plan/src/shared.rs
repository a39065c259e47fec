//! Values that equal objects share, to save memory.
use std::collections::HashSet;
use std::hash::Hash;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// A value that other objects may share. Changing a shared value copies it first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shared<T>(Arc<T>);

impl<T> From<T> for Shared<T> {
    fn from(value: T) -> Self {
        Self(Arc::new(value))
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Clone> DerefMut for Shared<T> {
    fn deref_mut(&mut self) -> &mut T {
        Arc::make_mut(&mut self.0)
    }
}

/// Keeps one copy of equal values.
#[derive(Debug, Clone)]
pub struct Interner<T: ?Sized> {
    values: HashSet<Arc<T>>,
    /// Number of values at which unused values are dropped.
    cleanup_threshold: usize,
}

/// Number of values below which unused values are kept.
const MIN_CLEANUP_THRESHOLD: usize = 256;

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self { values: HashSet::new(), cleanup_threshold: MIN_CLEANUP_THRESHOLD }
    }
}

impl<T: ?Sized + Eq + Hash> Interner<T> {
    /// Replaces `value` with the interned equal value. If no equal value is interned, interns
    /// `value`.
    pub fn intern(&mut self, value: &mut Arc<T>) {
        if let Some(known) = self.values.get(&**value) {
            *value = Arc::clone(known);
            return;
        }
        if self.values.len() >= self.cleanup_threshold {
            self.values.retain(|value| Arc::strong_count(value) > 1);
            // A scan visits all values. Raise the limit, so that the next scan happens only after
            // many new values.
            self.cleanup_threshold = self.values.len().saturating_mul(2).max(MIN_CLEANUP_THRESHOLD);
            self.values.shrink_to(self.cleanup_threshold);
        }
        self.values.insert(Arc::clone(value));
    }

    /// Returns the number of values, used or not.
    pub fn count(&self) -> usize {
        self.values.len()
    }
}

impl<T: Eq + Hash> Interner<T> {
    /// Replaces the value with an equal stored value, as [`Interner::intern`] does.
    pub fn share(&mut self, value: &mut Shared<T>) {
        self.intern(&mut value.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_stored_once_and_a_change_copies_the_value() {
        let mut interner = Interner::<String>::default();
        let (mut a, mut b) = (Shared::from("x".to_owned()), Shared::from("x".to_owned()));
        interner.share(&mut a);
        interner.share(&mut b);
        assert!(Arc::ptr_eq(&a.0, &b.0));
        b.push('y');
        assert_eq!((a.as_str(), b.as_str()), ("x", "xy"));
    }

    #[test]
    fn unused_values_are_dropped() {
        let mut interner = Interner::<str>::default();
        let mut kept = Arc::from("kept");
        interner.intern(&mut kept);
        for number in 0..100_000 {
            interner.intern(&mut Arc::from(number.to_string()));
        }
        assert!(interner.count() <= MIN_CLEANUP_THRESHOLD, "{} values are kept", interner.count());
        let mut again = Arc::from("kept");
        interner.intern(&mut again);
        assert!(Arc::ptr_eq(&kept, &again));
    }
}
