//! Checks the webhooks that the API server calls before it creates Cleave's pods.
use cleave_api::names::COMPONENT_LABEL;
use cleave_plan::constraints::Labels;

use super::super::facts::{Webhook, WebhookConfiguration, WebhookRule};
use super::super::report::{FindingReason, Report, join_names};
use super::namespace;
use super::view::{View, items};

/// The label that the API server adds to each namespace.
const NAMESPACE_NAME_LABEL: &str = "kubernetes.io/metadata.name";
/// The components of Cleave that run in pods.
const COMPONENTS: [&str; 4] = ["agent", "kubelet-relay", "mps-host", "operator"];

/// Adds a finding for each configuration with a webhook that can block Cleave's pods.
pub(super) fn check(view: &View<'_>, report: &mut Report) {
    let mut labels = namespace::namespace(view).map(|found| found.metadata.labels.clone()).unwrap_or_default();
    labels.insert(NAMESPACE_NAME_LABEL.to_owned(), view.target.namespace.clone());
    let mutating = items(&view.facts.mutating_webhooks).iter().map(|one| ("MutatingWebhookConfiguration", one));
    let validating = items(&view.facts.validating_webhooks).iter().map(|one| ("ValidatingWebhookConfiguration", one));
    for (kind, configuration) in mutating.chain(validating).filter(|(_, one)| !belongs_to_cleave(one)) {
        let blocking: Vec<&str> = configuration
            .webhooks
            .iter()
            .filter(|webhook| blocks_pods(webhook, &labels))
            .map(|webhook| webhook.name.as_str())
            .collect();
        if blocking.is_empty() {
            continue;
        }
        report.add_warning(
            FindingReason::WebhookMatchesNamespace,
            format!(
                "{kind} {} has webhooks for new pods in the namespace {}: {}. Their failurePolicy is Fail, so Cleave's \
                 pods cannot be created while one of them does not answer. They may also refuse privileged pods.",
                configuration.metadata.name,
                view.target.namespace,
                join_names(blocking)
            ),
            format!("Exclude the namespace {} from the webhook, or make an exception there.", view.target.namespace),
        );
    }
}

fn belongs_to_cleave(configuration: &WebhookConfiguration) -> bool {
    configuration.metadata.labels.get("app.kubernetes.io/name").is_some_and(|name| name == "cleave")
}

/// Returns whether pods of one of the [`COMPONENTS`] cannot be created while the webhook does not
/// respond. Does not evaluate match conditions.
fn blocks_pods(webhook: &Webhook, namespace: &Labels) -> bool {
    let pod = |component: &str| -> Labels {
        [("app.kubernetes.io/name", "cleave"), ("app.kubernetes.io/instance", "cleave"), (COMPONENT_LABEL, component)]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into()
    };
    webhook.failure_policy != "Ignore"
        && webhook.rules.iter().any(creates_pods)
        && webhook.namespace_selector.matches(namespace)
        && COMPONENTS.iter().any(|component| webhook.object_selector.matches(&pod(component)))
}

fn creates_pods(rule: &WebhookRule) -> bool {
    let any = |values: &[String], expected: &[&str]| values.iter().any(|value| expected.contains(&value.as_str()));
    any(&rule.operations, &["*", "CREATE"])
        && any(&rule.api_groups, &["*", ""])
        && any(&rule.resources, &["*", "*/*", "pods"])
}
