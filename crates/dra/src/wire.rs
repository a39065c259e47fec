//! The objects of the API group `resource.k8s.io/v1` that Cleave writes and reads, as JSON.
//!
//! The types contain only the fields that Cleave uses. `k8s-openapi` has these types only from its
//! feature `v1_34` on, and Cleave builds with `v1_33`.
use std::collections::BTreeMap;

use cleave_plan::Quantity;
use serde::{Deserialize, Serialize};

/// Maximum number of devices of one slice. The API server allows 128, but only 64 if a device
/// consumes counters or has taints. Any device may receive a taint later, and devices must not move
/// to another slice then.
pub const MAX_DEVICES: usize = 64;
/// Maximum number of counter sets of one slice.
pub const MAX_COUNTER_SETS: usize = 8;
/// Maximum number of counters of one counter set.
pub const MAX_COUNTERS: usize = 32;
/// Maximum length of the value of a string attribute, in bytes.
pub const MAX_ATTRIBUTE_LENGTH: usize = 64;
/// Maximum number of devices that one claim can be allocated.
pub const MAX_RESULTS: usize = 32;

/// Devices or shared counters of one node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceSlice {
    /// `resource.k8s.io/v1`.
    pub api_version: String,
    /// `ResourceSlice`.
    pub kind: String,
    /// Name of the object.
    pub metadata: Metadata,
    /// Content of the slice.
    pub spec: ResourceSliceSpec,
}

/// Name of an object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Metadata {
    /// Name of the object.
    pub name: String,
}

/// Content of a slice. A slice contains either devices or shared counters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourceSliceSpec {
    /// Name of the driver.
    pub driver: String,
    /// The node that can use the devices.
    pub node_name: String,
    /// The pool that the slice belongs to.
    pub pool: ResourcePool,
    /// Counters that devices of the pool consume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared_counters: Vec<CounterSet>,
    /// Devices, in the order in which the scheduler tries them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<Device>,
}

/// The pool of a slice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResourcePool {
    /// Name of the pool.
    pub name: String,
    /// Generation of the pool. The scheduler ignores slices of older generations.
    pub generation: i64,
    /// Number of slices of this generation. The scheduler allocates nothing from a pool that lacks
    /// slices.
    pub resource_slice_count: usize,
}

/// Counters that devices share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CounterSet {
    /// Name, unique in the pool.
    pub name: String,
    /// Available amounts.
    pub counters: BTreeMap<String, Counter>,
}

/// An amount of one counter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    /// The amount.
    pub value: Quantity,
}

/// A device that a claim can be allocated.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// Name, unique in the pool.
    pub name: String,
    /// Whether several requests can share the device. The requests then consume its capacity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allow_multiple_allocations: Option<bool>,
    /// Properties for the expressions of classes and claims.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attributes: BTreeMap<String, Attribute>,
    /// Amounts that requests compare with, or consume if the device is shared.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub capacity: BTreeMap<String, Capacity>,
    /// Amounts of shared counters that the device needs while it is allocated. A shared device
    /// needs them once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub consumes_counters: Vec<CounterConsumption>,
    /// Reasons not to use the device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<Taint>,
}

/// Value of an attribute. The type `version` is missing, because the API accepts only semantic
/// versions and refuses `580.159.04`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Attribute {
    /// A text of at most [`MAX_ATTRIBUTE_LENGTH`] bytes.
    String(String),
    /// A number.
    Int(i64),
    /// A truth value.
    Bool(bool),
}

/// An amount of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    /// The total amount.
    pub value: Quantity,
    /// How much one request can consume. Without a policy, a request that names no amount consumes
    /// everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_policy: Option<RequestPolicy>,
}

/// How much of a capacity one request can consume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestPolicy {
    /// The amount of a request that names none.
    pub default: Quantity,
    /// The valid amounts.
    pub valid_range: ValidRange,
}

/// Amounts that a request can consume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ValidRange {
    /// The smallest amount.
    pub min: Quantity,
    /// The largest amount.
    pub max: Quantity,
    /// Amounts are rounded up to `min` plus a multiple of this step. The API refuses a step that
    /// exceeds the capacity together with `min`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<Quantity>,
}

/// Counters of one set that a device consumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CounterConsumption {
    /// Name of the set.
    pub counter_set: String,
    /// The amounts.
    pub counters: BTreeMap<String, Counter>,
}

/// A reason not to use a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Taint {
    /// Name of the reason, as the key of a label.
    pub key: String,
    /// Details of the reason, as the value of a label.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// `NoSchedule` or `NoExecute`.
    pub effect: String,
    /// When the taint was added, as in RFC 3339. Without it, the API server sets the current time
    /// at each write, which restarts the time that a claim tolerates the taint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_added: Option<String>,
}

/// The devices of an allocated claim: `status.allocation.devices`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceAllocation {
    /// The allocated devices of all drivers.
    #[serde(default)]
    pub results: Vec<AllocatedDevice>,
    /// Configuration for the drivers, from the claim and its classes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub config: Vec<Configuration>,
}

/// One allocated device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedDevice {
    /// Name of the request, or `request/subrequest`.
    pub request: String,
    /// Name of the driver.
    pub driver: String,
    /// Name of the pool.
    pub pool: String,
    /// Name of the device.
    pub device: String,
    /// Whether the claim is for administration, beside the device's users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admin_access: Option<bool>,
    /// Identifies the share, if the device is shared.
    #[serde(default, rename = "shareID", skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// The consumed amount of each capacity, if the device is shared.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub consumed_capacity: BTreeMap<String, Quantity>,
}

/// Configuration for one driver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Configuration {
    /// Configuration in a format that only the driver knows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opaque: Option<OpaqueConfiguration>,
}

/// Configuration in a format that only the driver knows. The parameters are not read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OpaqueConfiguration {
    /// Name of the driver.
    pub driver: String,
}
