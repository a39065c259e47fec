//! Sums amounts of resources as the scheduler does. Pure.
use std::collections::BTreeMap;

use cleave_plan::Quantity;
use serde::Deserialize;

/// Requests and limits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// Requested amounts.
    pub requests: BTreeMap<String, Quantity>,
    /// Limits. If `requests` does not name a resource, the limit of the resource is also its
    /// request.
    pub limits: BTreeMap<String, Quantity>,
}

/// Amounts by resource.
#[derive(Debug, Clone, Default)]
pub struct Sum {
    amounts: BTreeMap<String, Amount>,
}

/// An amount in thousandths, or a text that is not a quantity. One malformed quantity makes the sum
/// of its resource malformed.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Amount {
    Milli(u64),
    Malformed(Quantity),
}

impl Sum {
    /// Adds the requests. If `requests` does not name a resource, the limit of the resource is also
    /// its request.
    pub(crate) fn add(&mut self, resources: &Resources) {
        let implied = resources.limits.iter().filter(|(name, _)| !resources.requests.contains_key(*name));
        for (name, quantity) in resources.requests.iter().chain(implied) {
            self.add_one(name, quantity);
        }
    }

    /// Adds an amount of one resource.
    pub fn add_one(&mut self, name: &str, quantity: &Quantity) {
        let amount = quantity.milli().map_or_else(|| Amount::Malformed(quantity.clone()), Amount::Milli);
        self.add_amount(name, amount);
    }

    /// Replaces the amounts of the resources that another sum contains.
    pub(crate) fn replace(&mut self, other: Self) {
        self.amounts.extend(other.amounts);
    }

    fn add_amount(&mut self, name: &str, amount: Amount) {
        let sum = self.amounts.entry(name.to_owned()).or_insert(Amount::Milli(0));
        match (&mut *sum, amount) {
            (Amount::Milli(sum), Amount::Milli(more)) => *sum = sum.saturating_add(more),
            (Amount::Malformed(_), _) => {}
            (_, malformed) => *sum = malformed,
        }
    }

    /// Adds another sum.
    pub(crate) fn add_sum(&mut self, other: &Self) {
        for (name, amount) in &other.amounts {
            self.add_amount(name, amount.clone());
        }
    }

    /// Raises amounts so that none is lower than the amount of the same resource in another sum.
    pub(crate) fn raise_to(&mut self, other: &Self) {
        for (name, amount) in &other.amounts {
            let sum = self.amounts.entry(name.clone()).or_insert(Amount::Milli(0));
            match (&mut *sum, amount) {
                (Amount::Milli(sum), Amount::Milli(least)) => *sum = (*sum).max(*least),
                (Amount::Malformed(_), _) => {}
                (_, malformed) => *sum = malformed.clone(),
            }
        }
    }

    /// Converts the amounts to quantities in Kubernetes notation.
    pub fn into_quantities(self) -> BTreeMap<String, Quantity> {
        let quantity = |amount: Amount| match amount {
            Amount::Milli(milli) if milli % 1000 == 0 => Quantity::whole(milli / 1000),
            Amount::Milli(milli) => Quantity::new(&format!("{milli}m")),
            Amount::Malformed(text) => text,
        };
        self.amounts.into_iter().map(|(name, amount)| (name, quantity(amount))).collect()
    }
}
