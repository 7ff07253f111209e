//! Mixture of experts: a router sends each token through a few of many feed-forward networks.

use super::GatedTensors;

/// Geometry of the layers with experts, and how a token's experts are chosen: by the sigmoid of the router's logit
/// plus a correction bias, among the best groups of experts; weighted by the sigmoid alone.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// Experts.
    pub experts: usize,
    /// Experts of a token.
    pub per_token: usize,
    /// Inner width of one expert.
    pub ffn: usize,
    /// Inner width of the expert that every token goes through; 0 when there is none.
    pub shared_ffn: usize,
    /// Groups of consecutive experts; divides `experts`. A group's score is the sum of its two best experts'.
    pub groups: usize,
    /// Groups of a token.
    pub groups_per_token: usize,
    /// The weights of a token's experts are divided by their sum.
    pub renormalise: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Layers before the first one with experts; they have one feed-forward network.
    pub dense_layers: usize,
}

/// One layer's experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeTensors {
    /// Router, `[experts][hidden]`.
    pub router: Vec<f32>,
    /// Correction of the choice, `[experts]`.
    pub bias: Vec<f32>,
    /// The experts.
    pub experts: Vec<GatedTensors>,
    /// The expert of all tokens.
    pub shared: Option<GatedTensors>,
}
