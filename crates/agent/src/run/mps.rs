//! Forwards changes of the MPS host's state to the main loop.
use tokio::sync::{mpsc, watch};

use super::input::Input;
use crate::mps::View;
use crate::mps::link::Link;

/// Watches the MPS host, forever.
pub(super) async fn watch(link: Link, sender: watch::Sender<View>, inputs: mpsc::Sender<Input>) -> anyhow::Result<()> {
    let mut views = sender.subscribe();
    let forward = async {
        while views.changed().await.is_ok() {
            let view = views.borrow_and_update().clone();
            if inputs.send(Input::Mps(view)).await.is_err() {
                break;
            }
        }
    };
    tokio::select! {
        // Both run until the agent ends.
        () = link.follow(&sender) => {}
        () = forward => {}
    }
    Ok(())
}
