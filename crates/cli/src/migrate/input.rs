//! Recognizes the documents of the input, and parses them into types. Pure.
use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail, ensure};
use cleave_plan::constraints::Labels;
use serde_json::Value;

use super::pods::Workload;
use super::report::{Notes, Outcome, SettingPlace};
use super::sources::charts::{self, ChartFacts};
use super::sources::gke::{self, Pool};
use super::sources::hami::{self, HamiConfig};
use super::sources::mig_parted::{self, MigRule};
use super::sources::nos::{self, NosValues};
use super::sources::plugin::{self, MigStrategy, PluginConfig};

/// The node label whose value is the name of the plugin's configuration.
pub(super) const PLUGIN_LABEL: &str = "nvidia.com/device-plugin.config";
/// The node label whose value is the name of mig-parted's configuration.
pub(super) const MIG_LABEL: &str = "nvidia.com/mig.config";
/// Name of the configuration that the plugin's chart uses by default for nodes without a label.
const FALLBACK_CONFIG_NAME: &str = "default";

/// A document of the input.
#[derive(Debug, Clone)]
pub(super) struct Document {
    /// The file or cluster that contains the document, for the report.
    pub(super) origin: String,
    /// The content of the document.
    pub(super) value: Value,
    /// Whether the user passed the document in a file. `cleave migrate` skips unknown `ConfigMap`s
    /// of a cluster: most `ConfigMap`s contain no configuration of GPU software.
    pub(super) chosen: bool,
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    /// Name of the node.
    pub(super) name: String,
    /// Labels of the node.
    pub(super) labels: Labels,
}

/// The parsed input.
#[derive(Debug, Clone, Default)]
pub(super) struct Input {
    /// The plugin's configurations, by name. The name is empty if the configuration is a file of
    /// its own.
    pub(super) plugin: BTreeMap<String, PluginConfig>,
    /// Name of the plugin's configuration for nodes without a label.
    pub(super) default_plugin: Option<String>,
    /// How NVIDIA's plugin names MIG instances, if values of NVIDIA's charts or a `ClusterPolicy`
    /// determine this.
    pub(super) mig_strategy: Option<MigStrategy>,
    /// mig-parted's configurations, by name.
    pub(super) mig: BTreeMap<String, Vec<MigRule>>,
    /// Name of mig-parted's configuration for nodes without a label.
    pub(super) default_mig: Option<String>,
    /// Values of Nos.
    pub(super) nos: Option<NosValues>,
    /// GKE's node pools.
    pub(super) pools: BTreeSet<Pool>,
    /// HAMi's settings.
    pub(super) hami: Option<HamiConfig>,
    /// Nodes, sorted by name. Empty if the input has no nodes.
    pub(super) nodes: Vec<Node>,
    /// Pods, and the objects that create pods.
    pub(super) workloads: Vec<Workload>,
}

/// The documents of the input, by type.
#[derive(Debug, Default)]
struct SortedDocuments {
    /// Source, name of the `ConfigMap`, name of the configuration, content.
    plugin: Vec<(String, Option<String>, String, Value)>,
    mig: Vec<(String, Value)>,
    plugin_values: Vec<(String, Value)>,
    operator: Vec<(String, Value)>,
    nos: Vec<(String, Value)>,
    pools: Vec<(String, Value)>,
    hami: Vec<(String, Value)>,
    hami_devices: Vec<(String, Value)>,
    hami_nodes: Vec<(String, Value)>,
    nodes: Vec<Node>,
    workloads: Vec<Workload>,
}

/// Parses the documents of the input.
///
/// # Errors
/// Returns an error if a document without a kind is not recognized, if documents contradict each
/// other, or if the software that reads a document would refuse it.
pub(super) fn parse(documents: Vec<Document>, notes: &mut Notes) -> Result<Input> {
    let mut sorted = SortedDocuments::default();
    for document in documents {
        sorted.add(document, notes)?;
    }
    sorted.into_input(notes)
}

impl SortedDocuments {
    fn add(&mut self, document: Document, notes: &mut Notes) -> Result<()> {
        let Document { origin, value, chosen } = document;
        if value.is_null() {
            return Ok(());
        }
        let text = |pointer: &str| value.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (kind, name, namespace) = (text("/kind"), text("/metadata/name"), text("/metadata/namespace"));
        let source = match (kind.as_str(), namespace.as_str()) {
            ("", _) => origin.clone(),
            (kind, "") => format!("{kind} {name}"),
            (kind, namespace) => format!("{kind} {namespace}/{name}"),
        };
        if let Some(items) = value.get("items").and_then(Value::as_array) {
            let document = |value: &Value| Document { origin: origin.clone(), value: value.clone(), chosen };
            return items.iter().try_for_each(|item| self.add(document(item), notes));
        }
        match kind.as_str() {
            "" => {
                if let Some(value) = self.add_document_without_kind(&source, None, value) {
                    ensure!(value.is_object(), "{source}: a document is not a mapping");
                    bail!("{source}: a document was not recognized. {ACCEPTED_DOCUMENTS}");
                }
            }
            "ConfigMap" => return self.add_config_map(&source, &name, &value, chosen, notes),
            "ClusterPolicy" => {
                let spec = value.get("spec").cloned().unwrap_or_default();
                self.operator.push((source, spec));
            }
            "Node" => {
                let labels = value.pointer("/metadata/labels").cloned().unwrap_or_default();
                let labels: Option<Labels> =
                    serde_json::from_value(labels).with_context(|| format!("{source}: metadata.labels"))?;
                ensure!(self.nodes.iter().all(|node| node.name != name), "two Nodes are named {name}");
                self.nodes.push(Node { name, labels: labels.unwrap_or_default() });
            }
            "ElasticQuota" | "CompositeElasticQuota" => {
                notes.dropped(SettingPlace::of_whole_source(&source), "`cleave quotas import` translates quotas.");
            }
            _ => match Workload::parse(&value)? {
                Some(workload) => self.workloads.push(workload),
                None => notes.dropped(
                    SettingPlace::of_whole_source(&source),
                    format!("`cleave migrate` ignores objects of the kind {kind}."),
                ),
            },
        }
        Ok(())
    }

    /// Adds a document without a kind. `config` is the `ConfigMap` and the key that contain the
    /// document. Returns the document if it is not recognized.
    fn add_document_without_kind(&mut self, source: &str, config: Option<(&str, &str)>, value: Value) -> Option<Value> {
        let list = if mig_parted::is_mig_config(&value) {
            &mut self.mig
        } else if plugin::is_plugin_config(&value) {
            let (map, key) = config.map_or((None, ""), |(map, key)| (Some(map.to_owned()), key));
            self.plugin.push((source.to_owned(), map, key.to_owned(), value));
            return None;
        } else if hami::is_values(&value) {
            &mut self.hami
        } else if hami::is_device_config(&value) {
            &mut self.hami_devices
        } else if hami::is_node_config(&value) {
            &mut self.hami_nodes
        } else if gke::is_pool(&value) {
            &mut self.pools
        } else if nos::is_values(&value) {
            &mut self.nos
        } else if charts::is_plugin_values(&value) {
            &mut self.plugin_values
        } else if charts::is_operator_values(&value) {
            &mut self.operator
        } else {
            return Some(value);
        };
        list.push((source.to_owned(), value));
        None
    }

    fn add_config_map(
        &mut self,
        source: &str,
        name: &str,
        value: &Value,
        chosen: bool,
        notes: &mut Notes,
    ) -> Result<()> {
        let data = value.get("data").and_then(Value::as_object);
        for (key, text) in data.into_iter().flatten() {
            let source = format!("{source}, {key}");
            let Some(text) = text.as_str() else { bail!("{source}: the value must be a string") };
            let parsed = super::yaml::parse_one(text);
            let value = match parsed {
                Ok(value) => value,
                Err(_) if !chosen => continue,
                Err(error) => return Err(error).context(source),
            };
            if self.add_document_without_kind(&source, Some((name, key)), value).is_some() && chosen {
                notes.add(
                    SettingPlace::of_whole_source(&source),
                    Outcome::Unknown,
                    "`cleave migrate` does not recognize this document, and ignores it.",
                );
            }
        }
        Ok(())
    }

    fn into_input(self, notes: &mut Notes) -> Result<Input> {
        let mut input = Input { nodes: self.nodes, workloads: self.workloads, ..Input::default() };
        input.nodes.sort_by(|a, b| a.name.cmp(&b.name));
        let mut chart = ChartFacts::default();
        for (source, value) in self.plugin_values {
            merge_chart_facts(&mut chart, charts::parse_plugin_values(&source, value, notes)?, &source)?;
        }
        for (source, value) in self.operator {
            merge_chart_facts(&mut chart, charts::parse_operator(&source, value, notes)?, &source)?;
        }
        if chart.gpu_operator && chart.mig_strategy.is_none() && !self.mig.is_empty() {
            chart.mig_strategy = Some(MigStrategy::read(
                SettingPlace {
                    source: "GPU Operator".to_owned(),
                    setting: "mig.strategy".to_owned(),
                    value: "single".to_owned(),
                },
                "single",
                notes,
            )?);
        }
        input.mig_strategy = chart.mig_strategy;
        let mut plugin = self.plugin;
        for (name, value) in std::mem::take(&mut chart.configs) {
            let value = match value {
                Value::String(text) => super::yaml::parse_one(&text).with_context(|| format!("config {name}"))?,
                value => value,
            };
            plugin.push((format!("config {name} of the values"), None, name, value));
        }
        input.add_plugin_configs(plugin, &chart, notes)?;
        input.add_mig_configs(self.mig, &chart, notes)?;
        for (source, value) in self.nos {
            ensure!(input.nos.is_none(), "{source}: the input contains two values files of Nos");
            input.nos = Some(nos::parse(&source, value, notes)?);
        }
        for (source, value) in self.pools {
            input.pools.extend(gke::parse(&source, &value, notes)?);
        }
        for node in input.nodes.iter().filter(|node| gke::is_gke_node(&node.labels)) {
            // Nodes of one pool have the same labels. Report these labels once.
            let mut lines = Notes::default();
            let name = node
                .labels
                .get(gke::GKE_POOL_LABEL)
                .map_or_else(|| format!("Node {}", node.name), |pool| format!("Node pool {pool}"));
            if input.pools.insert(gke::from_labels(&name, &node.labels, &mut lines)?) {
                notes.lines.append(&mut lines.lines);
            }
        }
        let mut hami = HamiConfig::default();
        let has_hami = [&self.hami, &self.hami_devices, &self.hami_nodes].iter().any(|list| !list.is_empty());
        for (source, value) in self.hami {
            hami::parse_values(&source, value, &mut hami, notes)?;
        }
        for (source, value) in self.hami_devices {
            hami::parse_device_config(&source, value, &mut hami, notes)?;
        }
        for (source, value) in self.hami_nodes {
            hami::parse_node_config(&source, value, &mut hami, notes)?;
        }
        input.hami = has_hami.then_some(hami);
        Ok(input)
    }
}

/// The documents that `cleave migrate` reads, for the error about an unrecognized document.
const ACCEPTED_DOCUMENTS: &str = "`cleave migrate` reads configurations of NVIDIA's device plugin and of mig-parted, values of the \
                     charts of NVIDIA's device plugin, the GPU Operator, Nos and HAMi, configurations of HAMi, node \
                     pools of GKE, and Kubernetes objects.";

/// Adds the facts of another chart. Returns an error if two charts set different values for the
/// same fact.
fn merge_chart_facts(chart: &mut ChartFacts, other: ChartFacts, source: &str) -> Result<()> {
    fn set_once<T: PartialEq>(first: &mut Option<T>, second: Option<T>, what: &str, source: &str) -> Result<()> {
        ensure!(first.is_none() || second.is_none() || *first == second, "{source}: two charts set {what} differently");
        if second.is_some() {
            *first = second;
        }
        Ok(())
    }
    let ChartFacts { mig_strategy, config_map, configs, default_config, default_mig, gpu_operator } = other;
    set_once(&mut chart.mig_strategy, mig_strategy, "the MIG strategy", source)?;
    set_once(&mut chart.config_map, config_map, "the plugin's ConfigMap", source)?;
    set_once(&mut chart.default_config, default_config, "the plugin's default configuration", source)?;
    set_once(&mut chart.default_mig, default_mig, "the MIG manager's default configuration", source)?;
    chart.configs.extend(configs);
    chart.gpu_operator |= gpu_operator;
    Ok(())
}

impl Input {
    fn add_plugin_configs(
        &mut self,
        configs: Vec<(String, Option<String>, String, Value)>,
        chart: &ChartFacts,
        notes: &mut Notes,
    ) -> Result<()> {
        for (source, map, key, value) in configs {
            if let (Some(map), Some(used)) = (&map, &chart.config_map)
                && map != used
            {
                notes.dropped(
                    SettingPlace::of_whole_source(&source),
                    format!("The plugin uses the ConfigMap {used}, not this one."),
                );
                continue;
            }
            let Some(mut config) = plugin::parse(&source, value, notes)? else { continue };
            config.mig_strategy = chart.mig_strategy.or(config.mig_strategy);
            let name = if key.is_empty() { "a file" } else { &key };
            ensure!(
                self.plugin.insert(key.clone(), config).is_none(),
                "{source}: the input contains two configurations of NVIDIA's device plugin from {name}"
            );
        }
        self.default_plugin = match &chart.default_config {
            Some(name) => {
                ensure!(self.plugin.contains_key(name), "the default configuration {name} is not in the input");
                Some(name.clone())
            }
            None if self.plugin.contains_key("") => Some(String::new()),
            // Unlike the plugin's chart, the GPU Operator has no default configuration.
            None if chart.gpu_operator => None,
            None if self.plugin.contains_key(FALLBACK_CONFIG_NAME) => Some(FALLBACK_CONFIG_NAME.to_owned()),
            None if self.plugin.len() == 1 => self.plugin.keys().next().cloned(),
            None => None,
        };
        Ok(())
    }

    fn add_mig_configs(&mut self, configs: Vec<(String, Value)>, chart: &ChartFacts, notes: &mut Notes) -> Result<()> {
        let used: BTreeSet<&str> =
            self.nodes.iter().filter_map(|node| node.labels.get(MIG_LABEL)).map(String::as_str).collect();
        let no_nodes = self.nodes.is_empty();
        let wanted = |name: &str| no_nodes || used.contains(name) || chart.default_mig.as_deref() == Some(name);
        let mut all = BTreeMap::new();
        for (source, value) in configs {
            for (name, rules) in mig_parted::parse(&source, value, &wanted, notes)? {
                ensure!(
                    all.insert(name.clone(), rules).is_none(),
                    "{source}: mig-configs.{name} is in the input twice"
                );
            }
        }
        self.default_mig = chart.default_mig.clone().filter(|name| all.contains_key(name));
        self.mig = all;
        Ok(())
    }
}
