"""From logits to tokens: parameters, filters, noise keyed by position, token trees and their acceptance."""
